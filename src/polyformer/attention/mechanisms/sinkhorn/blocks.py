"""Blocks of tokens: tables of integers for the queries and keys of a call, and attention within blocks.

Blocks begin with their document and have `size` of its non-padding tokens, so that padding at any place and
other documents in the row have no influence. The blocks of a row are numbered consecutively; R is the number
of distinct batch rows, 1 if all have the same layout. Cost: a few integers per token.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.cache_capacity import cache_capacity
from polyformer.attention.functional.documents import take_tokens, token_ranks
from polyformer.attention.mechanisms.sinkhorn.definition import filled_mass
from polyformer.core.errors import InputError
from polyformer.core.ops.layers import dropout
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks of all keys, and the A blocks that contain queries ("query blocks").

    Args:
        index: [R, N, size], the slots of each block's tokens, Tk for empty places.
        column: [R, N], a block's number in its document.
        first_block: [R, N], the number of its document's first block; -1 for a block without tokens.
        query_blocks: [R, A], the numbers of the blocks with queries.
        has_block: [R, A], whether there is such a block.
        begins: [R, A], whether its first token is new: not yet in the state.
        any_begin: whether any block begins.
        queries: [R, A, size], the queries of each query block, Tq for empty places.
        query_places: [R, Tq], the position of each query in the flattened `queries`; A size for padding.
        length: Tk.
        all_new: whether all keys are new; all blocks then count as query blocks.
    """

    index: Tensor
    column: Tensor
    first_block: Tensor
    query_blocks: Tensor
    has_block: Tensor
    begins: Tensor
    any_begin: bool
    queries: Tensor
    query_places: Tensor
    length: int
    all_new: bool

    @property
    def filled(self) -> Tensor:
        """A mask [R, N, size] of the places of each block that have a token."""
        return self.index < self.length

    @property
    def query_index(self) -> Tensor:
        """The rows of `index` for the query blocks, [R, A, size]."""
        return self.take_query_blocks(self.index).masked_fill(~self.has_block.unsqueeze(2), self.length)

    def query_block_numbers(self) -> Tensor:
        """Return the number of each query's block, [R, Tq]; -1 for padding."""
        number = self.query_blocks.gather(
            1, (self.query_places // self.index.shape[2]).clamp(max=self.query_blocks.shape[1] - 1)
        )
        return number.masked_fill(self.query_places >= self.query_blocks.shape[1] * self.index.shape[2], -1)

    def tokens(self) -> Tensor:
        """Return the range of keys start <= j < stop of each block, [R, N, 2]; 0, 0 for empty blocks."""
        most = self.index.masked_fill(~self.filled, -1).amax(2)
        return torch.stack([self.index.amin(2), most + 1], 2) * (most >= 0).unsqueeze(2)

    def take_query_blocks(self, table: Tensor) -> Tensor:
        """Return the rows of a table [R, N, ...] for the query blocks, [R, A, ...]."""
        rows = torch.arange(len(table), device=table.device).unsqueeze(1)
        return table[rows, self.query_blocks]

    def sources(self, causal: bool) -> Tensor:
        """Return whether block j may be sorted into the place of query block i, [R, A, N]."""
        first_block = self.take_query_blocks(self.first_block).unsqueeze(2)
        same = (
            (first_block == self.first_block.unsqueeze(1)) & (first_block >= 0) & self.has_block.unsqueeze(2)
        )
        if not causal:
            return same
        return same & (
            torch.arange(self.first_block.shape[1], device=first_block.device)
            < self.query_blocks.unsqueeze(2)
        )


def blocks_of(context: Context, size: int, fresh: int, device: torch.device) -> Blocks:
    """Return the blocks of a call with `fresh` new keys at the end."""
    real, rank, _ = token_ranks(context, device)
    rows, length = real.shape
    # A block begins at every `size`-th token of a document.
    number = (real & (rank % size == 0)).cumsum(1) - 1
    count = _max_blocks(context, number, size)
    slots = torch.arange(length, device=device).expand(rows, -1)
    # The place of each token in the concatenated blocks.
    at = torch.where(real, number * size + rank % size, count * size)
    # Padding has the position count * size, which `_scatter` drops.
    index = _scatter(slots, at, count * size, length).view(rows, count, size)
    first = index[:, :, 0].clamp(max=length - 1)
    exists = index[:, :, 0] < length
    column = rank.gather(1, first) // size * exists
    first_block = (number.gather(1, first) - column).masked_fill(~exists, -1)

    queries = slice(context.offset, context.offset + context.q_len)
    own_real, own_number = real[:, queries], number[:, queries]
    all_new = fresh == length
    first_asked = torch.where(own_real, own_number, count).amin(1, keepdim=True)
    first_asked = torch.where((first_asked == count) | all_new, 0, first_asked)
    # All blocks from the first with a query on; a row without queries starts at block 0.
    most = count if all_new else _max_query_blocks(context, own_number, own_real, first_asked, count, size)
    query_blocks = first_asked + torch.arange(most, device=device)
    has_block = query_blocks < count
    query_blocks = query_blocks.clamp(max=count - 1)
    has_block = has_block & exists.gather(1, query_blocks)
    begins = has_block & (first.gather(1, query_blocks) >= length - fresh)
    query_places = torch.where(own_real, at[:, queries] - first_asked * size, most * size)
    numbers = torch.arange(context.q_len, device=device).expand(rows, -1)
    placed = _scatter(numbers, query_places, most * size, context.q_len).view(rows, most, size)
    some = _any_begin(context, begins, size, fresh)
    return Blocks(
        index,
        column,
        first_block,
        query_blocks,
        has_block,
        begins,
        some,
        placed,
        query_places,
        length,
        all_new,
    )


def to_blocks(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens [R, A, size] of x [B, H, T, D] as [B, H, A, size, D], zeros for an index of T."""
    length = x.shape[2]
    # Empty places read any token and are cleared afterwards.
    blocks = take_tokens(x, index.flatten(1).clamp(max=length - 1)).unflatten(2, index.shape[1:])
    return blocks.masked_fill((index == length)[:, None, :, :, None], 0.0)


def from_blocks(x: Tensor, query_places: Tensor) -> Tensor:
    """Return blocks [B, H, A, size, D] of queries as [B, H, Tq, D], with zeros for padding."""
    # Padding has the index A size: the row of zeros appended here.
    return take_tokens(F.pad(x.flatten(2, 3), (0, 0, 0, 1)), query_places)


def sort_blocks(s: Tensor, k: Tensor, v: Tensor, filled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [B, H, N, size, D] sorted by s [B, H, A, N], and the log of m [B, H, A, size].

    `filled`, [R, 1, N, size, 1], is 1 where a block has a token and 0 elsewhere. The sums of each place are
    divided by m = s filled, so they are averages over non-padding tokens; see `filled_mass` for empty places.
    """
    mass, log_mass = filled_mass((s @ filled.flatten(3)).unsqueeze(4))
    k, v = ((s @ x.flatten(3)).unflatten(3, x.shape[3:]) / mass for x in (k, v))
    return k, v, log_mass.squeeze(4)


def _scatter(values: Tensor, at: Tensor, count: int, fill: int) -> Tensor:
    """Return `values` [R, T] scattered to their positions `at`, [R, count], with `fill` elsewhere.

    Values at position `count` are dropped.
    """
    table = torch.full((len(at), count + 1), fill, dtype=torch.long, device=at.device)
    return table.scatter(1, at, values)[:, :count]


def _max_blocks(context: Context, number: Tensor, size: int) -> int:
    """Return the maximum number of blocks of a row, or an upper bound."""
    if context.kv_doc is None:
        return -(-context.kv_len // size)
    return context.kv_len if torch.compiler.is_compiling() else max(1, int(number[:, -1].max()) + 1)


def _max_query_blocks(
    context: Context, number: Tensor, real: Tensor, first: Tensor, count: int, size: int
) -> int:
    """Return the maximum number of blocks that a row's queries are in, or an upper bound."""
    if context.kv_doc is None:
        return min(count, (context.q_len + size - 2) // size + 1)
    if torch.compiler.is_compiling():
        return min(count, context.q_len)
    return max(1, int(torch.where(real, number - first + 1, 0).max()))


def _any_begin(context: Context, begins: Tensor, size: int, fresh: int) -> bool:
    if context.kv_doc is None and context.kv_valid is None:
        return -(-context.kv_len // size) > -(-(context.kv_len - fresh) // size)
    return torch.compiler.is_compiling() or bool(begins.any())


def check_count(blocks: Blocks, context: Context, size: int, most: int) -> None:
    """Raise `InputError` if a document has more than `most` blocks.

    A compiled graph cannot read the lengths of packed documents before it runs: it raises a `RuntimeError`
    with the same message instead.
    """
    message = (
        f"input: a document has more than {most * size} tokens, the limit of the sorting network; "
        "shorten it, or build the mechanism with a greater max_length"
    )
    count = blocks.column.shape[1]
    if count <= most:
        return
    if torch.compiler.is_compiling() and context.kv_doc is not None:
        torch.ops.aten._assert_async.msg(blocks.column.max() < most, message)
    elif context.bare or torch.compiler.is_compiling() or int(blocks.column.max()) >= most:
        raise InputError(message)


RUN_FACTOR = 16
"""The size of a run's scores in multiples of `cache_capacity`: smaller runs have too few blocks a product."""


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, rate: float) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias) v, [B, H, A, Q, Dv].

    Args:
        q: [B, H, A, Q, D].
        k, v: [B, H, A or 1, K, D]; a dimension of 1 is shared by all blocks of queries.
        bias: broadcasts to the scores [B, H, A, Q, K]; minus infinity where a key is masked.
        rate: the dropout probability.
    """
    q = q * q.shape[4] ** -0.5
    rows = q.shape[0] * q.shape[1] * q.shape[3] * k.shape[3]
    # With dropout all blocks are one run, so that a seed gives the same mask on all processors.
    whole = rate > 0 or torch.compiler.is_compiling()
    step = q.shape[2] if whole else max(1, RUN_FACTOR * cache_capacity(q) // rows)
    parts = []
    for start in range(0, q.shape[2], step):
        run = slice(start, start + step)
        keys, values, own = (x if x.shape[2] == 1 else x[:, :, run] for x in (k, v, bias))
        weights, _ = softmax(q[:, :, run] @ keys.mT + own)
        parts.append(dropout(weights, rate) @ values)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
