"""A pattern of two methods is everything that a built-in one is."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from attention_cases import dense, random_context
from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.backends.tiled.tiles import TileSizes, plan
from polyformer.attention.patterns import Causal, Pattern, Window
from polyformer.attention.patterns.layout import Keys
from polyformer.attention.patterns.windows import ByDistance
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Near(ByDistance):
    before: int = 3
    after: int = 1
    every_th: int = 1

    def ends(self) -> tuple[int, int]:
        return self.before, self.after

    def sees(self, distance: Tensor) -> Tensor:
        return distance % self.every_th == 0


@dataclasses.dataclass(frozen=True)
class Holes(ByDistance):
    def ends(self) -> tuple[int, int]:
        return 20, 3

    def sees(self, distance: Tensor) -> Tensor:
        return (distance < 4) | (distance % 8 > 5)


@dataclasses.dataclass(frozen=True)
class Runs(ByDistance):
    runs: tuple[tuple[int, int], ...] = ((0, 2), (5, 7))

    def ends(self) -> tuple[int, int]:
        return max(greatest for _, greatest in self.runs), 0

    def sees(self, distance: Tensor) -> Tensor:
        inside = [(distance >= least) & (distance <= greatest) for least, greatest in self.runs]
        return torch.stack(inside).any(0)


@dataclasses.dataclass(frozen=True)
class LogSparse(ByDistance):
    """Distances 0, 1, 2, 4, 8, ... up to `farthest`. Li et al. 2019, section 4.2."""

    farthest: int = 16
    after: int = 0

    def ends(self) -> tuple[int, int]:
        return self.farthest, self.after

    def sees(self, distance: Tensor) -> Tensor:
        return distance.abs() & (distance.abs() - 1) == 0


def test_a_window_is_found_to_be_one() -> None:
    context = Context(100, 130)
    own, built_in = Near(9, 4), Window(9, 4)
    assert own.layout(context, 16) == built_in.layout(context, 16)
    assert torch.equal(dense(own, context, 1, 1), dense(built_in, context, 1, 1))
    assert own.structure.step == 1


def test_distances_that_nobody_attends_to_are_not_computed() -> None:
    length = 16384
    context = Context(length, length, causal=True)
    work = plan(LogSparse(length) & Causal(), context, 4, TileSizes()).scores / length**2
    assert work <= 0.05, "fifteen runs of a row's width, of which early queries have fewer"


def test_a_row_names_the_runs_of_distances() -> None:
    pattern, context = Runs(((0, 0), (64, 127), (256, 1023))), Context(64, 4096)
    first, last = 4064, 4079  # the slots of the queries 32 <= i < 48
    assert pattern.keys(context, 32, 48) == Keys(
        some=((first - 1023, last - 256 + 1), (first - 127, last - 64 + 1), (first, last + 1)),
        full=((last - 1023, first - 256 + 1), (last - 127, first - 64 + 1)),
    )


def test_a_row_of_one_query_needs_no_mask_for_distances_far_apart() -> None:
    far = tuple((4095 - distance, 4096 - distance) for distance in (2048, 1024, 512, 256, 128, 64))
    assert LogSparse(4096).keys(Context(1, 4096), 0, 1) == Keys((*far, (4063, 4096)), far)


@pytest.mark.parametrize("width", [1, 2, 64])
def test_narrow_gaps_are_masked_and_not_named(width: int) -> None:
    keys = Near(1 << 14, 0, 2).keys(Context(width, 1 << 14), 0, width)
    assert keys == Keys(((0, 1 << 14),))


def test_the_step_is_found() -> None:
    assert Near(30, 10, every_th=5).structure.step == 5
    assert Holes().structure.step == 1
    assert Near(0, 0).structure.step == 1


MIXED = [Near(9, 4), Near(30, 10, 5), Holes(), Near(0, 0), Holes() | Near(60, 0, 6), LogSparse(64, 20)]


@pytest.mark.parametrize("pattern", MIXED, ids=str)
def test_it_agrees_with_the_definition(pattern: ByDistance) -> None:
    torch.manual_seed(0)
    for causal in (False, True):
        context = random_context(2, 90, 103, causal=causal, documents=True, padding=True)
        q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64) for length in (90, 103, 103))
        both = [
            attend(q, k, v, pattern=pattern, context=context, backend=backend)
            for backend in ("tiled", "definition")
        ]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 37), (131, 131), (13, 259), (1, 257), (259, 259)])
@pytest.mark.parametrize("pattern", [LogSparse(1 << 12), LogSparse(100, 70), Holes()], ids=str)
def test_it_agrees_with_the_definition_at_odd_sizes(pattern: ByDistance, queries: int, keys: int) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64) for length in (queries, keys, keys))
    for causal, documents, padding in itertools.product((False, True), repeat=3):
        context = random_context(2, queries, keys, causal=causal, documents=documents, padding=padding)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        results = []
        for backend in ("tiled", "definition"):
            out = attend(*inputs, pattern=pattern, context=context, backend=backend)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("pattern", [Near(9, 4), Near(30, 10, 5), Holes(), LogSparse(90, 40)], ids=str)
def test_its_layout_covers_its_mask(pattern: ByDistance) -> None:
    context = Context(70, 75)
    mask = dense(pattern, context, 1, 1)[0, 0]
    for row in pattern.layout(context, 16):
        needed = torch.zeros(75, dtype=torch.bool)
        for start, stop in row.keys.some:
            needed[start:stop] = True
        assert not (mask[row.start : row.stop] & ~needed).any()
        for start, stop in row.keys.full:
            assert mask[row.start : row.stop, start:stop].all()


def test_required_options_need_examples() -> None:
    class Wide(ByDistance):
        def __init__(self, width: int) -> None:
            self.width = width

    del Pattern.registry["Wide"]
    with pytest.raises(InputError, match=r"Wide: it has options without defaults .*define `examples`"):
        Wide.examples()


@pytest.mark.parametrize("name", ["structure", "keys", "causal"])
def test_an_option_may_not_hide_a_method(name: str) -> None:
    """It would fail later, in a decoder with a cache."""
    with pytest.raises(InputError, match=f"Hidden: the option '{name}' would hide the method of this name"):
        type("Hidden", (ByDistance,), {"__annotations__": {name: int}, name: 3})
    assert "Hidden" not in Pattern.registry
