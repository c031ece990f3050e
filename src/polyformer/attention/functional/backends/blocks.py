"""Attention in blocks for exported graphs: the number of tokens is open, and time grows in proportion to it.

Queries are cut into blocks of equal size. Each block reads a few groups of keys: the blocks around it, linked
blocks, and the global tokens at both ends of the text. One softmax joins the groups. The global tokens, as
queries, read all keys. `Structure.blocks` of the pattern selects the keys, and its rule masks each pair, so a
group may contain too many keys, but no key twice.

The length is unknown while such a graph is traced, so a plan must not depend on it: whether a mask is small,
or which intervals of keys a layout lists. The exporter sets a limit on the length and reads the plans
(`graph_calls`).
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import BlockNeeds


@dataclasses.dataclass(frozen=True)
class GraphCalls:
    """The calls of a graph. longest: the most tokens of a text. plans: of all calls so far, as texts."""

    longest: int
    plans: list[str] = dataclasses.field(default_factory=list)


_current: contextvars.ContextVar[GraphCalls | None] = contextvars.ContextVar("graph_calls", default=None)


@contextlib.contextmanager
def graph_calls(longest: int) -> Iterator[GraphCalls]:
    """Plan the calls inside for all texts of up to `longest` tokens, and yield the record of their plans."""
    token = _current.set(calls := GraphCalls(longest))
    try:
        yield calls
    finally:
        _current.reset(token)


def current_graph_calls() -> GraphCalls | None:
    """Return the record of the graph that is exported now; None outside of an export."""
    # Dynamo, which traces Python code, cannot read a context variable; the exporter does not use it.
    if torch.compiler.is_dynamo_compiling() or not torch.compiler.is_exporting():
        return None
    return _current.get()


SMALL, LARGE = 64, 128
"""The size of a block for windows of less than 512 tokens, and for others."""

MOST_LINKED = 1 << 17
"""The longest text for a pattern with a table of linked blocks."""


@dataclasses.dataclass(frozen=True)
class QueryBlocks:
    """Blocks of `size` queries with `before` and `after` blocks around them; `links`: of each block, padded
    with -1."""

    needs: BlockNeeds
    size: int
    before: int
    after: int
    links: list[list[int]]

    @classmethod
    def of(cls, needs: BlockNeeds, longest: int) -> "QueryBlocks":
        """Return the blocks for texts of up to `longest` tokens."""
        size, links = needs.size, []
        if needs.links is None:
            size *= max(1, (SMALL if needs.before + needs.after < 512 else LARGE) // size)
        else:
            rows = needs.links(count_blocks(longest, size))
            most = max(map(len, rows))
            links = [[*row, *[-1] * (most - len(row))] for row in rows]
        return cls(needs, size, -(-needs.before // size), -(-needs.after // size), links)

    @property
    def keys(self) -> int:
        """The number of keys of a query that is not global."""
        linked = len(self.links[0]) if self.links else 0
        return (self.before + 1 + self.after + linked) * self.size + self.needs.first + self.needs.last

    def __str__(self) -> str:
        return f"blocks of {self.size} with {self.keys} keys"


def count_blocks(length: int, size: int) -> int:
    """Return the number of blocks of a text: two or more, because tracing takes one block as a constant."""
    return (length + size - 1) // size + 1


def choose(request: Request) -> QueryBlocks | str:
    """Return the blocks of a call in an exported graph, or why it cannot be computed in blocks."""
    calls = current_graph_calls()
    if calls is None:
        return "no graph is exported"
    if request.pattern is None:
        return "every query sees every key"
    if request.context.q_start is not None:
        return "the queries continue a cache"
    if request.return_lse or (request.relative is not None and request.relative.position_values is not None):
        return "it needs all scores"
    needs = request.pattern.structure.blocks
    if needs is None:
        return "its pattern has no rule for blocks"
    if needs.links is not None and calls.longest > MOST_LINKED:
        return "links to blocks need a largest length"
    blocks = QueryBlocks.of(needs, calls.longest)
    if blocks.keys >= calls.longest:
        return f"a block would see {blocks.keys} keys, and the longest text has {calls.longest}"
    return blocks


def run(request: Request, blocks: QueryBlocks) -> tuple[Tensor, None]:
    """Return output [B, H, T, Dv], and None for the log-sum-exp."""
    text = Text.of(request, blocks)
    out = text.near_and_linked()
    if blocks.needs.first + blocks.needs.last:
        out = text.with_global_queries(out)
    if blocks.needs.whole:
        out = text.with_short_rows(out)
    return text.in_original_order(out), None


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Keys and values [B, H, N or 1, K, D] for N blocks, and which tokens they are.

    tokens: their numbers [B or 1, N or 1, K]. use: false for a token that a block must not read here.
    """

    k: Tensor
    v: Tensor
    tokens: Tensor
    use: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """A call with its padding moved to the end of each row, so that token n is at position n.

    slots: the slot of each token [B, T], and `tokens` the reverse; None where no padding was moved. real: the
    number of tokens that are not padding, [B, 1] or [1, 1].
    """

    request: Request
    blocks: QueryBlocks
    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor
    slots: Tensor | None = None
    tokens: Tensor | None = None

    @classmethod
    def of(cls, request: Request, blocks: QueryBlocks) -> "Text":
        """Return the text of a request."""
        k, v = (
            x.repeat_interleave(request.groups, 1) if request.groups > 1 else x
            for x in (request.k, request.v)
        )
        length, valid = request.context.kv_len, request.context.kv_valid
        if valid is None or not blocks.needs.by_position:
            return cls(request, blocks, request.q, k, v, torch.full((1, 1), length, device=k.device))
        real = valid.long()
        count = real.sum(1, keepdim=True)
        tokens = torch.where(valid.bool(), real.cumsum(1) - 1, count + (1 - real).cumsum(1) - 1)
        every = torch.arange(length, device=k.device).expand_as(tokens)
        slots = torch.zeros_like(tokens).scatter(1, tokens, every)
        q, k, v = (_take(x, slots) for x in (request.q, k, v))
        return cls(request, blocks, q, k, v, count, slots, tokens)

    def in_original_order(self, out: Tensor) -> Tensor:
        """Return an output [B, H, T, Dv] with padding in its place."""
        return out if self.tokens is None else _take(out, self.tokens)

    def near_and_linked(self) -> Tensor:
        """Return the output [B, H, T, Dv] of all queries by the groups of their blocks."""
        size, device, length = self.blocks.size, self.q.device, self.request.context.q_len
        count = count_blocks(length, size)
        block = torch.arange(count, device=device)
        groups = [self._near(count)]
        if self.blocks.needs.first + self.blocks.needs.last:
            groups.append(self._ends(block))
        if self.blocks.links:
            groups.append(self._linked(block, count))
        queries = block.unsqueeze(1) * size + torch.arange(size, device=device)
        (q,) = self._gathered(queries, self.q)
        return self._attend(q, queries[None], groups).flatten(2, 3)[:, :, torch.arange(length, device=device)]

    def _gathered(self, tokens: Tensor, *inputs: Tensor) -> Iterator[Tensor]:
        """Return the tokens [N, K] of inputs [B, H, T, D]: [B, H, N, K, D]; any tokens beyond the ends."""
        inside = tokens.clamp(0, self.request.context.kv_len - 1)
        return (x[:, :, inside] for x in inputs)

    def _near(self, count: int) -> Group:
        """Return the keys around each of the blocks."""
        size, before, after = self.blocks.size, self.blocks.before, self.blocks.after
        length, device = self.request.context.kv_len, self.k.device
        start = torch.arange(count, device=device).unsqueeze(1) * size
        tokens = start + torch.arange(-before * size, (after + 1) * size, device=device)
        k, v = self._gathered(tokens, self.k, self.v)
        return Group(k, v, tokens[None], ((tokens >= 0) & (tokens < length))[None])

    def _end_tokens(self) -> tuple[Tensor, Tensor]:
        """Return numbers [B or 1, G] of global tokens, and which of them exist and are not repeated."""
        needs, device = self.blocks.needs, self.q.device
        first = torch.arange(needs.first, device=device).expand(self.real.shape[0], -1)
        last = self.real - needs.last + torch.arange(needs.last, device=device)
        tokens = torch.cat([first, last], 1)
        use = torch.cat([first < self.real, last >= needs.first], 1)
        return tokens.clamp(min=0), use

    def _ends(self, block: Tensor) -> Group:
        """Return the global tokens, except those among the keys around a block [N]."""
        tokens, use = self._end_tokens()
        tokens = tokens.clamp(max=self.request.context.kv_len - 1)
        k, v = (_take(x, tokens).unsqueeze(2) for x in (self.k, self.v))
        return Group(
            k, v, tokens[:, None], use[:, None] & ~self._is_near(tokens[:, None] // self.blocks.size, block)
        )

    def _linked(self, block: Tensor, count: int) -> Group:
        """Return the keys of the linked blocks of each block [N], except global and near keys."""
        size, needs, length = self.blocks.size, self.blocks.needs, self.request.context.kv_len
        numbers = torch.tensor(self.blocks.links, device=block.device)[block]  # [N, M]
        use = (numbers >= 0) & (numbers < count) & ~self._is_near(numbers, block)
        tokens = (numbers.unsqueeze(-1) * size + torch.arange(size, device=block.device)).flatten(1)
        k, v = self._gathered(tokens, self.k, self.v)
        use = use.repeat_interleave(size, 1) & (tokens < length) & (tokens >= needs.first)
        return Group(k, v, tokens[None], use & (tokens < (self.real - needs.last).unsqueeze(-1)))

    def _is_near(self, number: Tensor, block: Tensor) -> Tensor:
        """Return whether blocks by `number` [..., N or 1, M] are around each block [N]."""
        distance = number - block.unsqueeze(-1)
        return (distance >= -self.blocks.before) & (distance <= self.blocks.after)

    def with_global_queries(self, out: Tensor) -> Tensor:
        """Return the output with the rows of the global tokens, which see all keys."""
        tokens, use = self._end_tokens()
        length = self.request.context.q_len
        tokens = tokens.clamp(max=length - 1)
        queries = _take(self.q, tokens).unsqueeze(2)
        new = self._attend(queries, tokens[:, None], [self._every(length)]).squeeze(2).transpose(1, 2)
        # Rows that are not global go to an extra place at the end.
        place = torch.where(use, tokens, length)
        longer = F.pad(out.transpose(1, 2), (0, 0, 0, 0, 0, 1))
        row = torch.arange(out.shape[0], device=out.device).unsqueeze(1)
        every = torch.arange(length, device=out.device)
        return longer.index_put((row, place), new)[:, every].transpose(1, 2)

    def with_short_rows(self, out: Tensor) -> Tensor:
        """Return the output with the rows of short texts, in which all tokens see each other."""
        most, length = self.blocks.needs.whole, self.request.context.q_len
        start, every = (torch.arange(size, device=out.device) for size in (most, length))
        q, k, v = (F.pad(x, (0, 0, 0, most))[:, :, start] for x in (self.q, self.k, self.v))
        tokens = start.view(1, 1, -1)
        group = Group(k.unsqueeze(2), v.unsqueeze(2), tokens, tokens < length)
        new = F.pad(self._attend(q.unsqueeze(2), tokens, [group]).squeeze(2), (0, 0, 0, length))
        return torch.where((self.real <= most)[..., None, None], new[:, :, every], out)

    def _every(self, length: int) -> Group:
        tokens = torch.arange(length, device=self.k.device).view(1, 1, -1)
        return Group(self.k.unsqueeze(2), self.v.unsqueeze(2), tokens, tokens >= 0)

    def _attend(self, q: Tensor, queries: Tensor, groups: list[Group]) -> Tensor:
        """Return attention [B, H, N, S, Dv] of q [B, H, N, S, D], the tokens `queries`, to all groups."""
        request, device = self.request, q.device
        b = torch.arange(q.shape[0], device=device).view(-1, 1, 1, 1, 1)
        h = torch.arange(q.shape[1], device=device).view(1, -1, 1, 1, 1)
        q_idx = self._slots(queries[:, None, :, :, None], b)
        change = None
        if request.relative is not None or request.score_mod is not None:
            change = request.whole_score_mod(request.context)
        scores, empty = [], torch.ones(1, dtype=torch.bool, device=device)
        for group in groups:
            kv_idx = self._slots(group.tokens[:, None, :, None], b)
            score = q @ group.k.mT * request.scale
            if change is not None:
                score = change(score, b, h, q_idx, kv_idx)
            assert isinstance(request.pattern, Pattern)
            allowed = request.pattern.allows(request.context, b, h, q_idx, kv_idx)
            allowed = allowed & group.use[:, None, :, None]
            scores.append(score.masked_fill(~allowed, torch.finfo(score.dtype).min))
            empty = empty & ~allowed.any(-1, keepdim=True)
        weights = torch.cat(scores, -1).softmax(-1).split([group.k.shape[3] for group in groups], -1)
        out = sum((w @ group.v for w, group in zip(weights[1:], groups[1:])), weights[0] @ groups[0].v)
        return out.masked_fill(empty, 0.0)

    def _slots(self, tokens: Tensor, b: Tensor) -> Tensor:
        """Return the slots of tokens [B or 1, 1, ...], with valid numbers for tokens out of the text."""
        tokens = tokens.clamp(0, self.request.context.kv_len - 1)
        return tokens if self.slots is None else self.slots[b, tokens]


def _take(x: Tensor, tokens: Tensor) -> Tensor:
    """Return the tokens [B or 1, K] of x [B, H, T, D]: [B, H, K, D]."""
    # `take_tokens` reads the number of rows, which a graph leaves open.
    row = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    return x.transpose(1, 2)[row, tokens].transpose(1, 2)
