"""A pattern of two methods is everything that a built-in one is."""

import dataclasses

import pytest
import torch
from torch import Tensor

from attention_cases import dense, random_context
from polyformer.dot_product.attend import attend
from polyformer.patterns import Window
from polyformer.patterns.by_distance import ByDistance
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class Near(ByDistance):
    before: int
    after: int
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


def test_a_window_is_found_to_be_one() -> None:
    context = Context(100, 130)
    own, built_in = Near(9, 4), Window(9, 4)
    assert own.layout(context, 16) == built_in.layout(context, 16)
    assert torch.equal(dense(own, context, 1, 1), dense(built_in, context, 1, 1))
    assert own.step() == 1


def test_the_step_is_found() -> None:
    assert Near(30, 10, every_th=5).step() == 5
    assert Holes().step() == 1
    assert Near(0, 0).step() == 1


MIXED = [Near(9, 4), Near(30, 10, 5), Holes(), Near(0, 0), Holes() | Near(60, 0, 6)]


@pytest.mark.parametrize("pattern", MIXED, ids=str)
def test_it_agrees_with_the_definition(pattern: ByDistance) -> None:
    torch.manual_seed(0)
    for causal in (False, True):
        context = random_context(2, 90, 103, causal=causal, documents=True, padding=True)
        q, k, v = (torch.randn(2, 2, length, 4, dtype=torch.float64) for length in (90, 103, 103))
        both = [
            attend(q, k, v, pattern=pattern, context=context, backend=one) for one in ("tiled", "definition")
        ]
        torch.testing.assert_close(*both)


@pytest.mark.parametrize("pattern", [Near(9, 4), Near(30, 10, 5), Holes()], ids=str)
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
