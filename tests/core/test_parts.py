"""Named parts of modules are found at once, and behave as attributes of `nn.Module` in every other way."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from polyformer.core.ops.linear import Linear
from polyformer.core.parts import parameter, submodule


class Scaled(nn.Module):
    """x times a weight, then a layer and an optional second layer."""

    weight: nn.Parameter = parameter()
    layer: Linear = submodule()
    second: Linear | None = submodule()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.layer = Linear(3, 3)
        self.second = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x * self.weight)
        return y if self.second is None else self.second(y)


@pytest.fixture
def module() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


X = torch.arange(6.0).view(2, 3)


def expected(module: Scaled) -> Tensor:
    return F.linear(X * 2, module.layer._parameters["weight"], module.layer._parameters["bias"])


def test_parts_are_registered_in_order(module: Scaled):
    assert list(module.state_dict()) == ["weight", "layer.weight", "layer.bias"]
    assert dict(module.named_children()) == {"layer": module.layer}
    torch.testing.assert_close(module(X), expected(module))


def test_a_part_can_be_replaced_set_to_none_and_removed(module: Scaled):
    module.second = Linear(3, 2)
    assert module(X).shape == (2, 2)
    module.second = None
    torch.testing.assert_close(module(X), expected(module))
    module.layer = nn.Identity()  # type: ignore[assignment]
    torch.testing.assert_close(module(X), X * 2)
    del module.layer
    assert not hasattr(module, "layer")
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'layer'"):
        module(X)


def test_a_pruned_weight_is_used():
    layer = Linear(3, 3)
    prune.l1_unstructured(layer, "weight", 0.5)
    assert (layer.weight == 0).sum() == 4
    torch.testing.assert_close(layer(X), F.linear(X, layer.weight_orig * layer.weight_mask, layer.bias))


def test_a_parametrized_weight_is_used():
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    layer = Linear(3, 3)
    before = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", Doubled())
    torch.testing.assert_close(layer(X), F.linear(X, 2 * before, layer.bias))


def test_a_functional_call_replaces_parameters_for_its_time(module: Scaled):
    weights = {name: torch.zeros_like(tensor) for name, tensor in module.state_dict().items()}
    assert not torch.func.functional_call(module, weights, (X,)).any()
    torch.testing.assert_close(module(X), expected(module))


def test_copies_have_their_own_parts(module: Scaled):
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            copied.weight.zero_()
        assert module.weight[0] == 2
        torch.testing.assert_close(module(X), expected(module))
        assert copied.layer is not module.layer


def test_a_graph_has_the_names_of_the_parts(module: Scaled):
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), expected(module))
    program = torch.export.export(module, (X,))
    assert [name for name, _ in program.named_parameters()] == list(module.state_dict())
