"""A new attention learns from the old one layer by layer, then the model by matrices of low rank."""

import pytest
import torch

from polyformer.applications.linearizing import Steps, transfer_attention, tune_low_rank
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert
from polyformer.models.presets import create_model

SIZES = {
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
HYBRID = 'alternate(mechanisms=["Window(4)", "gated_delta(short_convolution=null)"])'


def decoder() -> Transformer:
    torch.manual_seed(0)
    return create_model("llama-2-7b", **SIZES, vocab_size=30).eval()


def rows(count: int = 24) -> list[list[int]]:
    """Counting texts: the next token is the token before it plus the first token."""
    return [[(1 + step * place) % 30 for place in range(20)] for step in range(1, count + 1)]


def test_the_attention_of_every_layer_learns_and_nothing_else():
    old = decoder()
    new, _ = convert(old, HYBRID)
    others = {n: x.clone() for n, x in new.state_dict().items() if ".attention." not in n}
    first = transfer_attention(old, new, Steps(rows(), 80))
    last = transfer_attention(old, new, Steps(rows(), 80 * 60))
    assert len(first) == len(last) == 2
    assert all(after < 0.5 * before for before, after in zip(first, last))
    assert all(torch.equal(x, new.state_dict()[name]) for name, x in others.items())
    assert all(parameter.grad is None for parameter in old.parameters())
    assert all(parameter.requires_grad for parameter in new.parameters())


def test_tuning_changes_projections_by_matrices_of_low_rank():
    pytest.importorskip("peft")
    model = decoder()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    ids = torch.tensor(rows())
    loss = model(ids, labels=ids).loss
    tuned = tune_low_rank(model, Steps(rows(), 80 * 40))
    after = tuned.state_dict()
    assert after.keys() == before.keys()
    assert tuned(ids, labels=ids).loss < loss - 0.05
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    for name in changed:
        assert name.split(".")[-2] in {"query", "key", "value", "output", "up", "down"}
        assert torch.linalg.matrix_rank(after[name] - before[name], rtol=1e-3) <= 8


def test_models_that_do_not_match_are_refused():
    old, other = decoder(), create_model("llama-2-7b", **SIZES | {"num_hidden_layers": 1}, vocab_size=30)
    with pytest.raises(InputError, match="transfer: expected decoders with equally many layers, got 2 and 1"):
        transfer_attention(old, other, Steps(rows(), 80))
    with pytest.raises(InputError, match="tune: expected a decoder-only model"):
        tune_low_rank(create_model("t5-small", **SIZES | {"num_key_value_heads": 2}), Steps(rows(), 80))
