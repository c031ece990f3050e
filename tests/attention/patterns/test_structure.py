"""What patterns state of themselves holds for every pair that they allow, and combines as their rules do."""

import pytest
import torch

from polyformer.attention.patterns import Global, Strided, Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.composition import Without
from polyformer.attention.patterns.layout import BlockNeeds, Structure
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.reach import Reach

LENGTH = 40

NAMED = [kind for kind in Pattern.registry.values() if kind.__module__.startswith("polyformer")]


def examples() -> list[Pattern]:
    """Return examples of all patterns, and of their compositions."""
    plain = [pattern for kind in NAMED for pattern in kind.examples()]
    window, strided = Window(6, dilation=2), Strided(4)
    return [*plain, window & strided, window | strided, window | Window(2, 0), Without(window, Window(2))]


def visible(pattern: Pattern) -> torch.Tensor:
    """Return the visible pairs [B, H, Tq, Tk] of a text of two documents."""
    documents = (torch.arange(LENGTH) > 22).long().view(1, -1)
    tables = {"q_doc": documents, "kv_doc": documents}
    context = Context(LENGTH, LENGTH, **tables)
    slots = torch.arange(LENGTH)
    bound = pattern.bind(True, slots.device)
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.arange(2).view(1, -1, 1, 1)
    return bound.allows(context, b, h, slots.view(-1, 1), slots).expand(1, 2, LENGTH, LENGTH)


@pytest.mark.parametrize("pattern", examples(), ids=lambda pattern: pattern.to_text())
def test_every_visible_pair_has_the_structure(pattern: Pattern):
    structure = pattern.structure
    seen = visible(pattern)
    _, _, query, key = seen.nonzero(as_tuple=True)
    distance = query - key
    if structure.distances is not None:
        assert distance.min() >= structure.distances[0]
        assert distance.max() <= structure.distances[1]
    assert not (distance % structure.step).any()
    if structure.by_distance:
        diagonals = [seen.diagonal(shift, -2, -1) for shift in range(-LENGTH + 1, LENGTH)]
        assert all(bool(diagonal.all()) or not diagonal.any() for diagonal in diagonals)


def test_a_rule_on_distances_states_its_reach_and_blocks():
    structure = Window(6, 2, dilation=3).structure
    assert structure == Structure((-6, 18), 3, True, Reach(18), BlockNeeds(before=18, after=6))


def test_structures_combine_as_rules_do():
    window, strided, first = (pattern.structure for pattern in (Window(6, 2), Strided(4), Global(3)))
    assert window & strided == Structure((-2, 6), 4, True, Reach(6), BlockNeeds(before=6, after=2))
    assert (window | strided).distances is None
    assert window | first == Structure(
        None, 1, False, Reach(6, first=3), BlockNeeds(before=6, after=2, first=3)
    )
    assert window.without(first) == Structure((-2, 6), 1, False, window.reach, window.blocks)
