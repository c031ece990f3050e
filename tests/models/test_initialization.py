"""The table of initial weights, measured."""

import math

import pytest
import torch
from torch import Tensor, nn

from polyformer import create_model
from polyformer.attention.positions import LearnedConfig
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import EmbeddingConfig, StackConfig

WIDTH, VOCAB = 64, 500


def model(initializer_range: float | None, zero_branches: bool = False) -> Transformer:
    """An encoder-decoder with every sort of weight, the output matrix of its own among them."""
    torch.manual_seed(0)
    stack = StackConfig(num_hidden_layers=3, position=LearnedConfig())
    return Transformer(
        ModelConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            encoder=stack,
            decoder=stack,
            embedding=EmbeddingConfig(tied=False),
            head=LanguageModelConfig(bias=True),
            initializer_range=initializer_range,
            zero_branches=zero_branches,
        )
    )


def near(tensor: Tensor, deviation: float) -> None:
    assert abs(tensor.std().item() / deviation - 1) < 0.1
    assert abs(tensor.mean().item()) < 0.1 * deviation


def sorts(model: Transformer) -> dict[str, list[Tensor]]:
    """Weights by the rows of the table."""
    groups: dict[str, list[Tensor]] = {"vectors": [], "matrices": [], "last": [], "ones": [], "zeros": []}
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    for name, parameter in model.named_parameters():
        owner = name.rsplit(".", 1)[0]
        if name.endswith("bias"):
            groups["zeros"].append(parameter)
        elif owner in norms:
            groups["ones"].append(parameter)
        elif "tokens" in name or "tables" in name or name == "head.weight":
            groups["vectors"].append(parameter)
        elif ".layers." in name and name.endswith(("output.weight", "down.weight")):
            groups["last"].append(parameter)
        else:
            groups["matrices"].append(parameter)
    assert all(groups.values())
    return groups


def test_with_a_range():
    """GPT-2's scheme: normal, and the last matrices of sub-layers scaled down by the depth."""
    groups = sorts(model(0.05))
    for tensor in groups["vectors"] + groups["matrices"]:
        near(tensor, 0.05)
    for tensor in groups["last"]:
        near(tensor, 0.05 / math.sqrt(2 * 3))
    assert all((tensor == 0).all() for tensor in groups["zeros"])
    assert all((tensor == 1).all() for tensor in groups["ones"])


def test_without_one():
    """The scheme of 2017: Glorot's uniform matrices, vectors of length about one."""
    groups = sorts(model(None))
    for tensor in groups["vectors"]:
        near(tensor, 1 / math.sqrt(WIDTH))
    for tensor in groups["matrices"] + groups["last"]:
        bound = math.sqrt(6 / sum(tensor.shape))
        near(tensor, bound / math.sqrt(3))
        assert tensor.abs().max() <= bound
    assert all((tensor == 0).all() for tensor in groups["zeros"])


@pytest.mark.parametrize("initializer_range", [0.02, None])
def test_a_seed_repeats_it(initializer_range: float | None):
    first, second = model(initializer_range).state_dict(), model(initializer_range).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize("initializer_range", [0.02, None])
def test_with_zero_branches_only_the_last_matrices_differ(initializer_range: float | None):
    plain, zero = sorts(model(initializer_range)), sorts(model(initializer_range, zero_branches=True))
    assert not any(tensor.any() for tensor in zero.pop("last"))
    for name, tensors in zero.items():
        assert all(map(torch.equal, tensors, plain[name])), name


def test_a_stack_of_zero_branches_is_the_identity_and_learns():
    torch.manual_seed(0)
    built = create_model("decoder-tiny", vocab_size=VOCAB, block="pre", dropout=0.0, zero_branches=True)
    ids = torch.randint(VOCAB, (2, 5))
    output = built(ids, labels=ids, output_hidden_states=True)
    assert output.hidden_states is not None
    assert all(torch.equal(hidden, output.hidden_states[0]) for hidden in output.hidden_states[:-1])
    assert output.loss is not None
    output.loss.backward()
    last = [x for name, x in built.named_parameters() if name.endswith(("output.weight", "down.weight"))]
    assert len(last) == 4
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in last)
