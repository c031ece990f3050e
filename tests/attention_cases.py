"""What the test files of `attend` share: inputs, contexts, results with every gradient, drawn patterns."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.backends.tiled.run import TILES
from polyformer.attention.functional.backends.tiled.tiles import TileSizes
from polyformer.attention.patterns import Causal, Documents, Full, Global, Padding, Pattern, Window
from polyformer.core.sequence.context import Context


def tensors(batch: int, heads: int, kv_heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in float64 that want gradients; the values have a width of their own."""
    shapes = (heads, queries, 6), (kv_heads, keys, 6), (kv_heads, keys, 5)
    q, k, v = (torch.randn(batch, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v


def random_context(
    batch: int,
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    documents: bool = False,
    padding: bool = False,
    q_start: int | None = None,
) -> Context:
    """Random documents and random padding; the first batch row is all padding and so sees nothing."""
    start = keys - queries if q_start is None else q_start
    doc = torch.randint(0, 3, (batch, keys)).sort().values if documents else None
    valid = torch.rand(batch, keys) > 0.3 if padding else None
    if valid is not None:
        valid[0] = False
    own = None if doc is None else doc[:, start : start + queries]
    return Context(queries, keys, causal=causal, q_start=q_start, q_doc=own, kv_doc=doc, kv_valid=valid)


def results(
    q: Tensor, k: Tensor, v: Tensor, *, tables: Sequence[Tensor] = (), lse: bool = True, **options: Any
) -> list[Tensor]:
    """Output, log-sum-exp and all gradients of a loss that weighs every entry differently."""
    sums = torch.zeros(())
    out = attend(q, k, v, return_lse=lse, **options)
    if lse:
        out, sums = out[0], out[1].masked_fill(out[1] == -torch.inf, 0.0)
    weights = torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape) / out.numel()
    loss = (out * weights).sin().sum() + (sums * weights[..., 0] if lse else sums).sum()
    return [out, sums, *torch.autograd.grad(loss, [q, k, v, *tables], retain_graph=True)]


def dense(pattern: Pattern, context: Context, batch: int, heads: int) -> Tensor:
    """The mask of a pattern, [B, H, Tq, Tk]."""
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(1, -1, 1, 1)
    q_idx, kv_idx = torch.arange(context.q_len).view(-1, 1), torch.arange(context.kv_len)
    return pattern.mask(context, b, h, q_idx, kv_idx).expand(batch, heads, -1, -1)


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest storage that any operation returns has."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Equal to 1e-10, relative and absolute."""
    for actual, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, other, rtol=1e-10, atol=1e-10)


def distance_bias(keys: int, heads: int) -> tuple[Tensor, Callable[..., Tensor]]:
    """A learned bias by distance and head, and the score_mod that adds it."""
    table = torch.randn(2 * keys + 1, heads, dtype=torch.float64, requires_grad=True)
    return table, lambda score, b, h, q_idx, kv_idx: score + table[q_idx - kv_idx + keys, h]


singles = st.one_of(
    st.builds(Window, st.integers(1, 9), st.integers(0, 9), st.integers(1, 3)),
    st.builds(Global, st.integers(1, 4)),
    st.sampled_from([Full(), Causal(), Documents(), Padding()]),
)

patterns: st.SearchStrategy[Pattern] = st.recursive(
    singles,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner), st.builds(lambda a, b: a | b, inner, inner)
    ),
    max_leaves=4,
)
"""Patterns and compositions of them with & and |."""


def small_tiles(block: int, width: int, heads: int = 1) -> AbstractContextManager[None]:
    """Tiles of at most this size, so many key heads at a time."""
    sizes = TileSizes(blocks=(block,), prices=(1.0,), width=width, entries=heads * block * width)
    return TILES.using(sizes)
