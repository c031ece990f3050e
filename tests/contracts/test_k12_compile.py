"""K12 one graph under torch.compile, or the class says why not; construction on the meta device."""

import dataclasses

import pytest
import torch
from members import Case, assert_same, bases, fits, gradients, parts, shrunk, with_part
from selection import cases, mechanisms, members
from shared_models import shared
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import AlternateConfig, LSHConfig, SoftmaxConfig
from polyformer.attention.patterns import Pattern
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.registry import in_package
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.stack import StackConfig

FROM_DYNAMO = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo itself makes an instance of every autograd function that it traces."""


def reason(case: Case) -> str:
    """Why a part of this case says that it cannot be one graph."""
    return next((part.eager for part in parts(case.config) if getattr(part, "eager", "")), "")


def short(case: Case) -> Case:
    """The case with one layer: compiling is slow."""
    return case.changed(StackConfig, lambda stack: dataclasses.replace(stack, num_hidden_layers=1))


def outputs(model: Transformer, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    out = model(**batch)
    return out.last_hidden_state, out.logits, out.loss


def assert_one_graph(model: Transformer, batch: dict[str, Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(outputs, backend="eager", fullgraph=True)
    for actual, expected in zip(compiled(model, batch), outputs(model, batch)):
        if expected is not None:
            assert_same(actual, expected)


MASK = (torch.arange(11) < torch.tensor([[11], [7]])).long()
"""Both rows of a case's batch, the second padded."""

EAGER = {"lsh", "moba", "nsa", "performer", "rfa", "routing", "top_blocks"}
"""The mechanisms that declare, with a reason, that they cannot be one graph."""


def test_only_these_mechanisms_cannot_be_one_graph():
    own = [config for _, config in mechanisms("graph of several") if in_package(type(config))]
    assert {config.kind for config in own if config.eager} == EAGER


def in_one_graph(contract: str) -> list[Case]:
    """The cases of a contract that do not say why they cannot be one graph."""
    return [case for case in cases(contract) if not reason(case)]


def buildable(config: ModelConfig) -> ModelConfig:
    """Return the configuration; a mechanism refuses what changes scores only where a model is built."""
    case = Case("", config)
    if not (case.can("supports_score_bias") and case.can("supports_part_rotations")):
        with torch.device("meta"):
            Transformer(shrunk(config))
    return config


def base_of(*chosen: Config) -> ModelConfig:
    """Return the first shape of model that can hold all of these parts; an encoder if none can."""
    return next(
        (base for shape, base in bases().items() if all(fits(part, shape) for part in chosen)),
        bases()["encoder"],
    )


def composed() -> list[Case]:
    """Return models that combine a member of each kind, enough to include every example: compiling is slow.

    A member that the others refuse has a model of its own. Patterns are compiled by themselves, below.
    """
    kinds: dict[str, list[Config]] = {}
    for name, part in members("graph of several"):
        if not name.startswith("Pattern") and not any(getattr(inner, "eager", "") for inner in parts(part)):
            kinds.setdefault(name.partition("-")[0], []).append(part)
    configs = []
    for number in range(max(map(len, kinds.values()))):
        chosen = [some[number % len(some)] for some in kinds.values()]
        together = base_of(*chosen)
        for part in chosen:
            try:
                together = buildable(with_part(together, part))
            except InputError:
                configs.append(with_part(base_of(part), part))
        configs.append(together)
    return [Case(f"composition-{n}", shrunk(config), number=n) for n, config in enumerate(configs)]


@FROM_DYNAMO
@pytest.mark.parametrize("case", [*in_one_graph("graph"), *composed()], ids=str)
def test_a_model_is_one_graph(case: Case):
    """Every second model reads a mask too."""
    model, batch = short(case).model(), case.labels(case.batch())
    assert_one_graph(model, {**batch, "attention_mask": MASK} if case.number % 2 else batch)


def patterns() -> dict[str, Pattern]:
    parts = dict(members("graph of several"))
    return {
        name: part.pattern
        for name, part in parts.items()
        if name.startswith("Pattern") and isinstance(part, SoftmaxConfig) and part.pattern is not None
    }


@pytest.mark.parametrize("pattern", patterns().values(), ids=patterns())
def test_a_pattern_is_in_the_graph_around_it(pattern: Pattern):
    torch._dynamo.reset()
    inputs = torch.randn(3, 2, 2, 11, 4, dtype=torch.float64).unbind()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert_same(compiled(*inputs, pattern=pattern), attend(*inputs, pattern=pattern))


@FROM_DYNAMO
@pytest.mark.parametrize("case", in_one_graph("graph with limits"), ids=str)
def test_a_model_with_padding_or_documents_is_one_graph(case: Case):
    """Whose limits are tensors, which a traced graph cannot read."""
    model, batch = short(case).model(), case.labels(case.batch())
    limits = {"attention_mask": MASK}
    if case.can("supports_packing") and case.shape != "pair":
        limits["document_ids"] = (torch.arange(11) > 4).long().expand(2, -1)
    assert_one_graph(model, {**batch, **limits})


def test_mechanisms_in_turn_say_what_their_parts_say():
    """Why they cannot be one graph: the reason of the first that cannot."""
    lsh, whole = LSHConfig(), SoftmaxConfig()
    assert AlternateConfig(mechanisms=(whole, lsh)).eager == lsh.eager
    assert AlternateConfig(mechanisms=(whole, whole)).eager == ""


@FROM_DYNAMO
def test_a_model_with_padding_is_one_graph_backward_too():
    case = Case("pair", shrunk(bases()["pair"]))
    model, batch = short(case).model(), case.labels(case.batch())
    batch["attention_mask"] = MASK
    torch._dynamo.reset()
    compiled = torch.compile(outputs, backend="aot_eager", fullgraph=True)
    hidden, _, loss = compiled(model, batch)
    expected, _, wanted = outputs(model, batch)
    assert_same(hidden, expected)
    assert loss is not None
    assert wanted is not None
    assert_same(gradients(model, loss), gradients(model, wanted))


@pytest.mark.parametrize("case", cases("meta"), ids=str)
def test_a_model_is_made_on_the_meta_device(case: Case):
    with torch.device("meta"):
        model = Transformer(case.config)
    real = shared(case)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in real.state_dict().items()
    }
