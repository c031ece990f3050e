"""BigBird's ITC form out of our patterns is transformers' BigBird with the same weights and random blocks.

Theirs draws random blocks only while training. In evaluation its table of random blocks is all zeros, so that
every query between the global blocks counts block 0 once more for each random block: a fault of theirs, which
is why the comparison runs in training mode, with dropout 0. A short text switches it to full attention for
all texts that follow.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import compare_gradients, same
from torch import Tensor

from polyformer.attention.patterns import (
    BlockWindow,
    Global,
    GlobalEnd,
    Links,
    Pattern,
    PerHead,
    PerLayer,
    Random,
)
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import from_transformers
from polyformer.models.presets import create_model

transformers = pytest.importorskip("transformers")
modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
pegasus = pytest.importorskip("transformers.models.bigbird_pegasus.modeling_bigbird_pegasus")

SIZES = {
    "vocab_size": 23,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "max_position_embeddings": 64,
}
BLOCK, RANDOM, LENGTH = 2, 2, 40
FIXED = BlockWindow(BLOCK) | Global(BLOCK) | GlobalEnd(BLOCK)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tables of random blocks [H, blocks - 2, RANDOM] that theirs uses, two gathers for each layer."""
    tables: list[Tensor] = []
    classes = modeling.BigBirdBlockSparseAttention, pegasus.BigBirdPegasusBlockSparseAttention
    gather = classes[0].torch_gather_b2

    def recorded(params: Tensor, indices: Tensor) -> Tensor:
        tables.append(indices[0])
        return gather(params, indices)

    for cls in classes:
        monkeypatch.setattr(cls, "torch_gather_b2", staticmethod(recorded))
    return tables


@pytest.fixture(autouse=True)
def numpy_state() -> Any:
    """Theirs seeds numpy's global generator in every layer."""
    state = np.random.get_state()
    yield
    np.random.set_state(state)


def theirs() -> Any:
    """In float64 and training mode, without dropout."""
    torch.manual_seed(0)
    config = transformers.BigBirdConfig(
        **SIZES,
        attention_type="block_sparse",
        block_size=BLOCK,
        num_random_blocks=RANDOM,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        hidden_act="gelu",
    )
    return shaken_in_training(transformers.BigBirdForMaskedLM(config))


def summarizer() -> Any:
    """The same attention in the encoder of BigBird-Pegasus."""
    torch.manual_seed(0)
    config = transformers.BigBirdPegasusConfig(
        vocab_size=23,
        d_model=12,
        encoder_layers=2,
        decoder_layers=1,
        encoder_ffn_dim=20,
        decoder_ffn_dim=14,
        encoder_attention_heads=3,
        decoder_attention_heads=2,
        max_position_embeddings=64,
        block_size=BLOCK,
        num_random_blocks=RANDOM,
        dropout=0.0,
    )
    return shaken_in_training(transformers.BigBirdPegasusForConditionalGeneration(config))


def shaken_in_training(model: Any) -> Any:
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def ours(other: Any, pattern: Pattern) -> Transformer:
    read = from_transformers(other)
    model = Transformer(read.config.override("encoder.attention.mechanism.pattern", pattern)).double().train()
    model.load_state_dict(read.state_dict())
    return model


def linked(tables: list[Tensor]) -> Pattern:
    """Their random blocks: a table for each layer and head, of the blocks between the first and the last."""
    layers = []
    for table in tables[::2]:
        rows = [((), *map(tuple, head.tolist()), ()) for head in table]
        layers.append(PerHead(tuple(FIXED | Links(BLOCK, tuple(item)) for item in rows)))
    return PerLayer(tuple(layers))


def ids(length: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(2, 23, (2, length))


@pytest.mark.parametrize("length", [LENGTH, 28])
@pytest.mark.parametrize("model", [theirs, summarizer])
def test_outputs_and_gradients(model: Callable[[], Any], length: int, drawn: list[Tensor]):
    other = model()
    more = {"decoder_input_ids": ids(5)} if model is summarizer else {}
    expected = other(input_ids=ids(length), **more).logits
    assert len(drawn) == 4
    assert all(table.min() > 0 for table in drawn)
    assert not torch.equal(drawn[0][0], drawn[0][1])
    mine = ours(other, linked(drawn))
    actual = mine(ids(length), **more).logits
    same(actual, expected)
    weight = torch.randn_like(expected)
    compare_gradients(mine, (actual * weight).sum(), other, (expected * weight).sum())


def test_theirs_counts_the_first_block_again_in_evaluation(drawn: list[Tensor]):
    """Its random blocks are then block 0, which it sees already; among our patterns seen twice is seen."""
    other = theirs().eval()
    output = other(input_ids=ids(LENGTH)).logits
    assert all(not table.any() for table in drawn)
    once = ours(other, FIXED)
    assert torch.equal(ours(other, linked(drawn))(ids(LENGTH)).logits, once(ids(LENGTH)).logits)
    assert (output - once(ids(LENGTH)).logits).abs().max() > 1e-3


@torch.no_grad()
def test_a_short_text_changes_nothing_for_those_that_follow():
    """Theirs goes over to full attention for ever; ours never does, and any length will do."""
    model = create_model("encoder-tiny", attention=FIXED | Random(1, BLOCK)).double().eval()
    before = model(ids(41), output_attentions=True)
    model(ids(3))
    after = model(ids(41), output_attentions=True)
    same(after.last_hidden_state, before.last_hidden_state)
    assert before.attentions is not None
    assert (before.attentions[0] == 0).any()
    assert torch.equal(after.attentions[0] == 0, before.attentions[0] == 0)
    other = theirs()
    assert other.bert.attention_type == "block_sparse"
    other.eval()(input_ids=ids(4))
    assert other.bert.attention_type == "original_full"
