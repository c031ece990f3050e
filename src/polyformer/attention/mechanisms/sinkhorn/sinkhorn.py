"""Sinkhorn attention: blocks of keys are reordered by a learned soft permutation.

    sorted block i = sum_j S_ij block j        S = Sinkhorn((SortingNet(block) + Gumbel noise) / temperature)

    sinkhorn   y = softmax over [own block; sorted block i] of q . k / sqrt(D), of their values
    sort_cut   y = softmax over [sorted blocks 1 .. cut] of q . k' / sqrt(D) + log m, of their values v'

`definition` has the equations. A network per head scores which blocks should be sorted into the place of each
block; Sinkhorn balancing turns the scores into a soft permutation S, in which every block is used about once.
Noise is drawn only in training. Tay et al. 2020, section 3.

In the causal form S_ij is 0 for j >= i, block i is represented by the tokens up to its first, and columns are
divided by their sums over the rows up to i: the block sorted into a block's place is complete
when the block begins, and depends on no later token. Sums over all rows, masked or not, would let a later
block change the output of earlier blocks. The first block of a document attends only to itself.

Deviations: blocks are represented by means of keys, not sums of hidden states: a sum grows with the length
and would make S hard. The block size is fixed, not the number of blocks, and blocks count only the tokens of
their document. Rows are balanced last, so that a sorted block is an average. In the last block, which may be
short, a place is weighted by the share of blocks that have a token there. The public `sinkhorn-transformer`
draws noise in evaluation too, and its causal form takes a plain softmax over earlier blocks, without
balancing.

Cost for n tokens and blocks of b: 2 n b products per dimension for attention, n^2 / b for sorting, n^2 / b^2
memory for S. With b = sqrt(n), the cheapest choice, n^1.5; measured from 4k to 64k tokens: time n^1.36,
memory n^0.94. A token of decoding costs 2 b, plus n if it begins a block. The state contains all keys and
values, the sorted block and the columns' sums.
"""

import dataclasses
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.documents import take_tokens
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import (
    Mechanism,
    MechanismBackend,
    MechanismConfig,
    PositionTerms,
    check_head_size,
)
from polyformer.attention.mechanisms.sinkhorn.blocks import (
    Blocks,
    attend_in_blocks,
    blocks_of,
    check_count,
    from_blocks,
    sort_blocks,
    to_blocks,
)
from polyformer.attention.mechanisms.sinkhorn.definition import (
    FLOOR,
    SortingNet,
    SortingOptions,
    definition,
    gumbel,
    sinkhorn_balance,
)
from polyformer.core.instrumentation import Lookup, record_lookup, record_mark
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.softmax import recorded, recording
from polyformer.core.ranges import PositiveFloat, PositiveInt, Probability, Wording
from polyformer.core.sequence.context import Context
from polyformer.core.state import State

SORTED = "blocks sorted into its place"
"""The name of the soft permutation in visualizations."""

Temperature = Annotated[PositiveFloat, Wording(fix="0.75 is usual")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkhornConfig(MechanismConfig):
    """Sinkhorn attention: each block attends to itself and to a block that is sorted next to it.

    `block_size` and `max_length` are the number of tokens of a block and of the longest text.
    """

    block_size: PositiveInt = 64
    max_length: PositiveInt = 4096
    iterations: PositiveInt = 8  # of balancing
    temperature: Temperature = 0.75  # the lower, the nearer S is to a permutation
    dropout: Probability = 0.0  # of attention weights
    backend: MechanismBackend = "auto"  # "definition": document by document

    kind: ClassVar[str] = "sinkhorn"
    paper: ClassVar[str] = "Tay et al. 2020, section 3"
    supports_score_bias: ClassVar[bool] = False

    def build(self, num_heads: int, head_size: int) -> "Sinkhorn":
        return Sinkhorn(self, num_heads, head_size)

    def sorting(self, noisy: bool) -> SortingOptions:
        """Return the sorting options of the definition."""
        return SortingOptions(self.block_size, self.iterations, self.temperature, noisy)

    @classmethod
    def examples(cls) -> tuple["SinkhornConfig", ...]:
        """Return configs with two block sizes, with S near a permutation and far from it."""
        return cls(block_size=3, max_length=72), cls(
            block_size=2, max_length=72, temperature=0.1, iterations=3
        )


@dataclasses.dataclass(frozen=True)
class SinkhornState(State):
    """All keys and values, and the sorting so far.

    `column_sums` [B, H, iterations, N] has the column sums of the N blocks so far (`definition`). `last` has
    the keys and values [B, H, 1, size, D] sorted into the place of the last block that began.
    """

    tokens: KeyValueCache
    column_sums: Tensor | None = None
    last: tuple[Tensor, Tensor] | None = None

    def after_call(
        self, begins: Tensor, keys: Tensor, values: Tensor, column_sums: Tensor
    ) -> "SinkhornState":
        """Return the state after a call with sorted blocks [B, H, A, size, D].

        `last` becomes the last block for which `begins` [R, A] is true; a row without such blocks keeps its
        `last`.
        """
        old = (None, None) if self.last is None else self.last
        number = (begins * torch.arange(1, begins.shape[1] + 1, device=begins.device)).amax(1)

        def chosen(new: Tensor, old: Tensor | None) -> Tensor:
            old = torch.zeros_like(new[:, :, :1]) if old is None else old
            index = number.view(-1, 1, 1, 1, 1).expand(*new.shape[:2], 1, *new.shape[3:])
            return torch.cat([old, new], 2).gather(2, index)

        last = chosen(keys, old[0]), chosen(values, old[1])
        return dataclasses.replace(self, column_sums=column_sums, last=last)


class Sinkhorn(Mechanism):
    """Attention of each block to itself and to the block sorted into its place."""

    def __init__(self, config: SinkhornConfig, num_heads: int, head_size: int):
        super().__init__()
        check_head_size(head_size)
        self.config = config
        self.count = -(-config.max_length // config.block_size)
        self.net = SortingNet(num_heads, head_size, self.count)

    def new_state(self, reserve: int) -> State:
        """Return an empty state with space for `reserve` tokens; the definition keeps only tokens."""
        tokens = KeyValueCache(reserve=reserve)
        return tokens if self.config.backend == "definition" else SinkhornState(tokens)

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Sort the blocks that begin in this call, and attend from the blocks of the queries."""
        dtype, fresh = q.dtype, k.shape[2]
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if self.config.backend == "definition":  # all blocks again in every call
            k, v, state = appended(state, k, v)
            with without_autocast(q):
                return self._by_definition(q, k, v, context).to(dtype), state
        assert isinstance(state, SinkhornState | None)
        if state is not None:
            k, v, tokens = state.tokens.append(k, v)
            state = dataclasses.replace(state, tokens=tokens)
        blocks = self._blocks(context, fresh, q.device)
        with without_autocast(q):
            if not recording():
                y, state = self._attend(q, k, v, blocks, context, state)
                return y.to(dtype), state
            y = self._by_definition(q, k, v, context)
            if state is not None:
                with recorded():  # discard the weights over blocks: only those over tokens are reported
                    _, state = self._attend(q, k, v, blocks, context, state)
        return y.to(dtype), state

    def _blocks(self, context: Context, fresh: int, device: torch.device) -> Blocks:
        """Return the block tables, which all layers of a call share."""
        size = self.config.block_size

        def make() -> Blocks:
            blocks = blocks_of(context, size, fresh, device)
            check_count(blocks, context, size, self.count)
            return blocks

        return context.once(("blocks", size, fresh, self.count), make)

    def _by_definition(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        return definition(q, k, v, self.net, self.config.sorting(self.training), context)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, context: Context, state: SinkhornState | None
    ) -> tuple[Tensor, SinkhornState | None]:
        size = self.config.block_size
        keys, values = (to_blocks(x, blocks.query_index) for x in (k, v))
        if context.causal:
            sorted_keys, sorted_values, log_mass, state = self._sort_causal(k, v, keys, values, blocks, state)
        else:
            sorted_keys, sorted_values, log_mass = self._sort(keys, values, blocks)
        hidden = (blocks.query_index == blocks.length)[:, None, :, None]
        if context.causal:
            # Later tokens of the own block; the sorted block consists of earlier tokens.
            hidden = hidden | torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        log_mass = log_mass.unsqueeze(3)
        # Own keys are masked per query, sorted keys per place: bring both to one shape.
        wide = torch.broadcast_shapes(bias.shape[:4], log_mass.shape[:4])
        y = attend_in_blocks(
            to_blocks(q, blocks.queries),
            torch.cat([keys, sorted_keys], 3),
            torch.cat([values, sorted_values], 3),
            torch.cat([bias.expand(*wide, -1), log_mass.expand(*wide, -1)], 4),
            self.config.dropout if self.training else 0.0,
        )
        return from_blocks(y, blocks.query_places), state

    def _sort(self, keys: Tensor, values: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
        """Return sorted keys and values [B, H, N, size, D] of all blocks, and log m [B, H, N, size]."""
        s, filled = self._sort_means(keys, blocks)
        self._record_sorting(s, blocks, own=True)
        return sort_blocks(s, keys, values, filled)

    def _sort_means(self, keys: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """Return S for the mean key of every block, and which places have a token, [B, 1, N, size, 1]."""
        filled = blocks.filled[:, None, :, :, None].to(keys.dtype)
        means = keys.sum(3) / filled.sum(3).clamp_min(1.0)
        s, _ = self._permutation(means, blocks, None, causal=False)
        return s, filled

    def _sort_causal(
        self,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Blocks,
        state: SinkhornState | None,
    ) -> tuple[Tensor, Tensor, Tensor, SinkhornState | None]:
        """Return the same as `_sort` for the query blocks, and the next state.

        Blocks that begin in this call are sorted here; the sorted block of an earlier begin is read from the
        state.
        """
        column = blocks.take_query_blocks(blocks.column)
        # Earlier blocks are full, so m = 1; the first block of a document has no sorted block (m = 0).
        log_mass = torch.zeros_like(column, dtype=k.dtype).masked_fill(column == 0, -torch.inf)
        log_mass = log_mass[:, None, :, None].expand(-1, -1, -1, self.config.block_size)
        last = None if state is None else state.last
        if last is not None and not blocks.any_begin:
            old_keys, old_values = (x.expand(-1, -1, column.shape[1], -1, -1) for x in last)
            # Decoding inside a block: nothing to sort, all queries read the block sorted before.
            return old_keys, old_values, log_mass, state
        tables = (keys, values) if blocks.all_new else [to_blocks(x, blocks.index) for x in (k, v)]
        earlier = blocks.sources(causal=True).unsqueeze(1).to(k.dtype)
        # All tokens of earlier blocks plus the first token of this block, so no later token is used.
        sums = earlier @ tables[0].sum(3) + keys[:, :, :, 0]
        means = sums / (column * self.config.block_size + 1)[:, None, :, None]
        s, column_sums = self._permutation(
            means, blocks, None if state is None else state.column_sums, causal=True
        )
        self._record_sorting(s, blocks, own=True)
        sorted_keys, sorted_values = (
            (s @ x.flatten(3)).unflatten(3, (self.config.block_size, -1)) for x in tables
        )
        if state is None or column_sums is None:
            return sorted_keys, sorted_values, log_mass, state
        state = state.after_call(blocks.begins, sorted_keys, sorted_values, column_sums)
        if last is not None:
            begins = blocks.begins[:, None, :, None, None]
            sorted_keys = torch.where(begins, sorted_keys, last[0])
            sorted_values = torch.where(begins, sorted_values, last[1])
        return sorted_keys, sorted_values, log_mass, state

    def _record_sorting(self, s: Tensor, blocks: Blocks, own: bool) -> None:
        """Report S [B, H, A, N] and each token's block to visualizations, if all keys are new.

        `own`: a query reads only the block sorted into the place of its block, otherwise all sorted blocks.
        """
        if not blocks.all_new:
            return
        record_mark("block", lambda: blocks.query_block_numbers().unsqueeze(1))
        rows = blocks.query_block_numbers() if own else None
        record_lookup(lambda: Lookup(SORTED, s.detach(), s.shape[3], rows=rows, tokens=blocks.tokens()))

    def _permutation(
        self, means: Tensor, blocks: Blocks, column_sums: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return S [B, H, A, N] of block representations [B, H, A, D], and the next column sums."""
        config, column = self.config, blocks.column
        # The network scores a block by its number in the document; `column` has it for each block of the row.
        columns = column[:, None, None].expand(*means.shape[:3], -1)
        scores = self.net(means).gather(3, columns)
        scores = (scores + gumbel(scores) if self.training else scores) / config.temperature
        allowed = (blocks.sources(causal) & blocks.begins.unsqueeze(2)).unsqueeze(1)
        if column_sums is not None:
            column_sums = F.pad(column_sums, (0, column.shape[1] - column_sums.shape[3]), value=FLOOR)
        return sinkhorn_balance(scores, allowed, config.iterations, column_sums, causal)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortCutConfig(SinkhornConfig):
    """SortCut attention: all queries attend to the first few of the sorted blocks.

    The sorted blocks are the same as in `sinkhorn`; the network learns to move the most relevant blocks to
    the front. It is for encoders: the first blocks are sorted from the whole text, so there is no causal
    form, and no state. Deviations as in `sinkhorn`.

    Cost for n tokens and blocks of b: 2 cut b n products per dimension for attention, cut n for sorting, n^2
    / b^2 for S: linear while n is small compared with b^3. For packed documents all blocks are sorted, n^2 /
    b. Measured with blocks of 64 from 4k to 64k tokens: time n^1.14, memory n^1.02.

    `cut`: the number of sorted blocks that all queries attend to. The other options are the same as in
    `sinkhorn`.
    """

    cut: PositiveInt = 2

    kind: ClassVar[str] = "sort_cut"
    paper: ClassVar[str] = "Tay et al. 2020, section 3 (SortCut)"
    causal: ClassVar[bool] = False
    supports_kv_cache: ClassVar[bool] = False
    instead: ClassVar[str] = "'sinkhorn', which attends to the query's own block and to an earlier block"

    def build(self, num_heads: int, head_size: int) -> "Sinkhorn":
        return SortCut(self, num_heads, head_size)

    def sorting(self, noisy: bool) -> SortingOptions:
        return dataclasses.replace(super().sorting(noisy), cut=self.cut)

    @classmethod
    def examples(cls) -> tuple["SortCutConfig", ...]:
        return cls(block_size=3, max_length=72), cls(block_size=4, max_length=72, cut=1, temperature=0.3)


class SortCut(Sinkhorn):
    """Attention to the first sorted blocks."""

    def __init__(self, config: SortCutConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        self.cut = config.cut

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, context: Context, state: SinkhornState | None
    ) -> tuple[Tensor, SinkhornState | None]:
        keys, values = (to_blocks(x, blocks.query_index) for x in (k, v))
        s, filled = self._sort_means(keys, blocks)
        single = context.kv_doc is None
        self._record_sorting(s[:, :, : self.cut], blocks, own=False)
        index, exists = first_blocks(blocks, self.cut, single)
        # With one document the first rows of S are enough; packed documents have their first blocks anywhere.
        sorted_blocks = sort_blocks(s[:, :, : self.cut] if single else s, keys, values, filled)
        sorted_keys, sorted_values, log_mass = (take_blocks(x, index) for x in sorted_blocks)
        log_mass = log_mass.masked_fill(
            ~exists.repeat_interleave(self.config.block_size, 2).unsqueeze(1), -torch.inf
        )
        rate = self.config.dropout if self.training else 0.0
        # [B, H, A, 1, cut size]: the same for all queries of a block.
        bias = log_mass.unsqueeze(3)
        y = attend_in_blocks(to_blocks(q, blocks.queries), sorted_keys, sorted_values, bias, rate)
        return from_blocks(y, blocks.query_places), state


def first_blocks(blocks: Blocks, cut: int, single: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers of the first `cut` blocks of each block's document, and whether they exist.

    [R, N, cut], or [R, 1, cut] for a `single` document, where all blocks have the same.
    """
    first_block, count = blocks.first_block, blocks.first_block.shape[1]
    first = (first_block[:, :1] if single else first_block).clamp_min(0).unsqueeze(2)
    numbers = first + torch.arange(cut, device=first_block.device)
    index = numbers.clamp(max=count - 1)
    rows = torch.arange(len(first_block), device=first_block.device).view(-1, 1, 1)
    return index, (numbers < count) & (first_block[rows, index] == first)


def take_blocks(x: Tensor, index: Tensor) -> Tensor:
    """Return the blocks `index` [R, A, cut] of x [B, H, N, size, ...], as [B, H, A, cut size, ...]."""
    wide = x.flatten(3)
    blocks = take_tokens(wide, index.flatten(1).clamp(max=x.shape[2] - 1))
    return blocks.unflatten(2, index.shape[1:]).unflatten(4, x.shape[3:]).flatten(3, 4)
