"""What patterns state besides their rule: the reach of queries, and the structure of pairs."""

import pytest
import torch

from polyformer.attention.patterns import Causal, Global, PerHead, PerLayer, Strided, Window
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.composition import Without
from polyformer.attention.patterns.implied import restricted
from polyformer.attention.patterns.layout import BlockNeeds, Structure
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import BLOCK, MARGIN, NO_TOKENS, ModelInputs, Reach

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


PATTERNS = [
    *(example for name in sorted(Pattern.registry) for example in Pattern.registry[name].examples()),
    Window(5) | Global(2),
    (Window(5) | Global(2)) & Window(9),
    PerHead((Window(2), Window(4, dilation=2))),
    PerLayer((Window(3), Causal())),
]
BOUNDED = [pattern for pattern in PATTERNS if pattern.causal() and pattern.structure.reach is not None]


def contexts(mask: torch.Tensor | None) -> list[tuple[Context, int]]:
    """Return contexts of the last tokens of a text, with the number of tokens before them."""
    all_contexts = []
    for new in (1, 6):
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        tokens = NO_TOKENS.extended(ModelInputs(ids, mask))
        all_contexts.append((tokens.context(new, True), LENGTH - new))
    return all_contexts


@pytest.mark.parametrize("padding", ["none", "left", "between"])
@pytest.mark.parametrize("pattern", BOUNDED, ids=str)
def test_keys_out_of_reach_are_never_seen(pattern: Pattern, padding: str):
    mask = None if padding == "none" else torch.ones(2, LENGTH, dtype=torch.long)
    if mask is not None:
        mask[1, slice(0, 7) if padding == "left" else slice(20, 26)] = 0
    own = pattern.structure.reach
    assert own is not None
    for context, before in contexts(mask):
        reach = own.in_slots(context)
        assert reach is not None
        far = torch.arange(LENGTH)
        far = (far >= reach.first) & (far < before - reach.last)
        b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(4).view(-1, 1, 1)
        limits = restricted(pattern, context)
        seen = limits.mask(context, b, h, torch.arange(context.q_len).view(-1, 1), torch.arange(LENGTH))
        queries = slice(0, None) if context.q_valid is None else context.q_valid.view(2, 1, -1, 1)
        seen = seen & queries if isinstance(queries, torch.Tensor) else seen
        assert not (seen & far).any()


def test_windows_have_a_reach():
    assert Window(5, 9).structure.reach == Reach(5)
    assert (Window(5, dilation=3) | Global(4)).structure.reach == Reach(15, first=4)
    assert (Window(5) & Causal()).structure.reach == Reach(5)
    assert (Window(5) | Causal()).structure.reach is None
    assert {type(pattern).__name__ for pattern in BOUNDED} >= {"Window", "BlockWindow", "Or", "PerHead"}


def test_packed_documents_have_no_first_slots():
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    documents = torch.arange(LENGTH).view(1, -1) // 10
    context = NO_TOKENS.extended(ModelInputs(ids, document_ids=documents)).context(1, True)
    assert Reach(5, first=2).in_slots(context) is None
    assert Reach(5).in_slots(context) == Reach(5)


def test_keys_are_kept_in_blocks():
    reach = Reach(100, first=3)
    assert [reach.kept(before) for before in (7, 100, 227)] == [7, 100, 227]
    assert reach.kept(228) == 228 - BLOCK
    kept = [reach.kept(before) for before in range(1000)]
    assert max(kept) == 100 + MARGIN + BLOCK - 1
    assert reach.most == 3 + max(kept) + 1
