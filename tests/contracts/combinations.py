"""Pairs of members of different axes, tried in tiny models: each runs, or an `InputError` says why not."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from members import LENGTH, Case, bases, fits, numbered, shrunk, with_part
from variants import VARIANTS

from polyformer.attention.positions import PositionConfig, RopeConfig
from polyformer.attention.positions.rope_extensions import RopeExtensionConfig
from polyformer.cli.commands.show import costs_by_length
from polyformer.cli.plots.model import cost, tree
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn import CachePolicy
from registered import registered

RUNS, REFUSED = "runs", "refused"


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """A choice on an axis. part: of the configuration, if it is one."""

    axis: str
    name: str
    change: Callable[[ModelConfig], ModelConfig]
    part: Config | None = None
    cache: CachePolicy | None = None

    def __str__(self) -> str:
        return f"{self.axis}-{self.name}"

    def fits(self, shape: str) -> bool:
        return self.part is None or fits(self.part, shape)


@functools.cache
def axes() -> dict[str, list[Member]]:
    """The members of each axis, the first example of each; a pattern is a choice of the mechanism's axis."""
    result: dict[str, list[Member]] = {}
    for name, part, number in numbered():
        if number:
            continue
        axis, _, kind = name.partition("-")
        axis = "Mechanism" if axis == "Pattern" else axis
        change = functools.partial(with_part, part=part)
        result.setdefault(axis, []).append(Member(axis, kind.removesuffix("-0"), change, part))
    for kind in registered(RopeExtensionConfig.kinds):
        part = RopeConfig(extension=kind.examples()[0])
        change = functools.partial(with_part, part=part)
        result["Position"].append(Member("Position", f"rope {kind.kind}", change, part))
    result["Variant"] = [Member("Variant", name, change) for name, change in VARIANTS.items()]
    result["Cache"] = [
        Member("Cache", kind.kind, lambda base: base, cache=kind.examples()[0])
        for kind in registered(CachePolicy.kinds)
    ]
    return result


def pairs() -> list[tuple[str, str]]:
    """Return all pairs of axes."""
    return list(itertools.combinations(axes(), 2))


def attempt(first: Member, second: Member) -> str:
    """Try a pair in the first shape of model that can hold it; any error but an `InputError` is raised."""
    shapes = [shape for shape in bases() if first.fits(shape) and second.fits(shape)]
    if not shapes:
        return REFUSED
    try:
        config = bases()[shapes[0]]
        # A memory sets positions that go on; a scheme of the pair replaces them.
        for member in sorted((first, second), key=lambda member: isinstance(member.part, PositionConfig)):
            config = member.change(config)
        case = Case(f"{first} with {second}", shrunk(config))
        model = Transformer(case.config)
        train(case, model)
        generate(case, model, first.cache or second.cache)
        show(case)
    except InputError:
        return REFUSED
    return RUNS


def train(case: Case, model: Transformer) -> None:
    """One pass forward and backward."""
    torch.manual_seed(0)
    output = model.train()(**case.labels(case.batch()))
    loss = output.last_hidden_state.sum() if output.loss is None else output.loss
    loss.backward()


def generate(case: Case, model: Transformer, cache: CachePolicy | None) -> None:
    """Three tokens, if the model can generate."""
    if case.shape == "encoder" or not model.head.predicts_next or not case.can("supports_kv_cache"):
        return
    inputs: dict[str, Any] = case.labels(case.batch())
    kept = "input_ids", "langs", "global_attention_mask", "relation_ids"
    prompt = {name: inputs[name] for name in kept if name in inputs}
    result = model.eval().generate(**prompt, max_new_tokens=3, cache=cache)
    assert result.sequences.shape[0] == len(prompt["input_ids"])


def show(case: Case) -> None:
    """What `polyformer show` prints of costs and modules."""
    with torch.device("meta"):
        model = Transformer(case.config)
    assert costs_by_length(functools.partial(cost, model), [LENGTH])
    assert tree(model)
