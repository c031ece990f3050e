"""K7 the layout covers the mask, and is made without a tensor of queries times keys."""

import pytest
import torch
from selection import patterns
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyformer.attention.patterns import Pattern
from polyformer.core.sequence.context import Context

NAMED = patterns()
PAIRS = [
    (f"{a} {sign} {b}", left & right if sign == "&" else left | right)
    for step, signs in ((1, "&|"), (4, "|&"))
    for number, (a, left) in enumerate(NAMED)
    for b, right in [NAMED[(number + step) % len(NAMED)]]
    for sign in signs[number % 2]
]
"""Each with a few others: what `&` and `|` do is the same for all, and any pattern may be drawn elsewhere."""


def contexts(rows: int, queries: int, keys: int) -> list[Context]:
    torch.manual_seed(9)
    documents = torch.randint(0, max(2, keys // 9), (rows, keys)).sort(1).values
    valid = torch.rand(rows, keys) > 0.1
    valid[:, : keys // 5] = False
    positions = (valid.long().cumsum(1) - 1).clamp_min(0)
    last = slice(keys - queries, keys)
    return [
        Context(queries, keys, causal=True),
        Context(queries, keys, q_start=2),
        Context(queries, keys, q_doc=documents[:, last], kv_doc=documents, kv_valid=valid),
        Context(queries, keys, causal=True, q_pos=positions[:, last], kv_pos=positions, kv_valid=valid),
    ]


@pytest.mark.parametrize(("name", "pattern"), [*NAMED, *PAIRS])
def test_a_layout_covers_its_mask(name: str, pattern: Pattern):
    for context in contexts(2, 37, 41):
        if context.causal and not pattern.causal():
            continue
        b, h = torch.arange(2).view(-1, 1, 1, 1), torch.arange(3).view(1, -1, 1, 1)
        q, kv = torch.arange(37).view(-1, 1), torch.arange(41)
        allowed = pattern.allows(context, b, h, q, kv).expand(2, 3, 37, 41)
        for block in (1, 5, 16, 64):
            rows = pattern.layout(context, block)
            assert [edge for row in rows for edge in range(row.start, row.stop)] == list(range(37))
            for row in rows:
                assert row.stop - row.start <= block
                needed, mine = torch.zeros(41, dtype=torch.bool), allowed[:, :, row.start : row.stop]
                for start, stop in row.keys.some:
                    assert 0 <= start < stop <= 41
                    needed[start:stop] = True
                assert not (mine.any((0, 1, 2)) & ~needed).any(), (name, row)
                for start, stop in row.keys.full:
                    assert mine[..., start:stop].all(), (name, row)


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return out


@pytest.mark.parametrize(("name", "pattern"), NAMED)
def test_a_layout_is_made_in_linear_memory(name: str, pattern: Pattern):
    length = 1 << 13
    for context in contexts(2, length, length):
        if context.causal and not pattern.causal():
            continue
        with Largest() as largest:
            rows = pattern.layout(context, 128)
        assert largest.entries <= 4 * length
        assert len(rows) <= length // 128 + 64
