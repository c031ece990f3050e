"""Separate projections for global tokens, which attend to all tokens with their own queries, keys and values.

    global i:    y_i = softmax(x_i W_qg (s W_kg)^T / sqrt(D)) s W_vg     s: all tokens that the context allows
    other i:     y_i = mechanism(x_i W_q, s W_k, s W_v)                  global tokens among its keys

The patterns `Global(n)`, `Marked()` and similar parts of the mechanism's pattern name the global tokens. Only
their rows are computed, gathered from their places in each batch row: g global tokens cost g Tk scores per
head in addition to the mechanism, and two more projections of every token. The KV cache of the global
projections is separate from the mechanism's. Beltagy et al. 2020 (Longformer), section 3.1; the output
projection is shared, as in the authors' code. Deviation: none; the paper has no causal models, where a global
token sees only its past.
"""

import dataclasses
from functools import partial

import torch
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns.base import MaskMod, ScoreMod
from polyformer.attention.patterns.global_base import GlobalPattern
from polyformer.attention.patterns.layout import unite
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.positions import Position, Site
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import record_mark
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.softmax import amend, recorded, recording
from polyformer.core.sequence.context import Context
from polyformer.core.state import State, StateOfStates
from polyformer.nn.stack.attention_options import split_global_tokens
from polyformer.nn.stack.config import AttentionConfig
from polyformer.nn.stack.multihead import site_of, split_heads

GLOBAL = "global"
"""The name of global tokens in visualizations."""


@dataclasses.dataclass(frozen=True)
class GlobalState(StateOfStates):
    """The mechanism's state, and the KV cache of the global projections for all tokens."""

    ordinary: State
    cache: KeyValueCache


@dataclasses.dataclass(frozen=True, eq=False)
class GlobalQueries:
    """The global queries of a call, in rows that are as long as the row with the most global queries.

    slots: [B, G], the indices of the queries. valid: [B, G] bool, False for the rest of a row with fewer.
    context: of these queries.
    """

    slots: Tensor
    valid: Tensor
    context: Context
    mask_mod: MaskMod | None


def find_queries(tokens: tuple[GlobalPattern, ...], context: Context, x: Tensor) -> GlobalQueries | None:
    """Return the global queries among x [B, Tq, E]; None if there are none."""
    rows, length = x.shape[:2]
    b = torch.arange(rows, device=x.device).unsqueeze(1)
    index = torch.arange(length, device=x.device)
    flags = torch.zeros(rows, length, dtype=torch.bool, device=x.device)
    for pattern in tokens:
        # [B, Tq], True for a query that any of the patterns makes global.
        flags = flags | pattern.is_global(context, "q", b, index)
    if context.kv_valid is not None:
        flags = flags & context.kv_valid[:, context.offset : context.offset + length].bool()
    count = _max_queries(tokens, context, flags)
    if not count:
        return None
    # A stable sort puts the global queries of each row first and keeps their order.
    slots = flags.long().argsort(dim=1, descending=True, stable=True)[:, :count]
    places = slots + context.offset
    gathered = Context(
        count,
        context.kv_len,
        q_start=0,
        q_pos=context.query_position(b, slots),
        kv_pos=context.kv_pos,
        q_doc=None if context.q_doc is None else context.q_doc.gather(1, slots),
        kv_doc=context.kv_doc,
        kv_valid=context.kv_valid,
    )
    # Gathered queries have other indices than in the text: causality compares their original slots.
    past = broadcasts(lambda b, h, q_idx, kv_idx: kv_idx <= places[b, q_idx]) if context.causal else None
    return GlobalQueries(slots, flags.gather(1, slots), gathered, past)


def _max_queries(tokens: tuple[GlobalPattern, ...], context: Context, flags: Tensor) -> int:
    """Return the greatest number of global queries in a row; while tracing, the greatest possible number."""
    if not torch.compiler.is_compiling() and not flags.is_meta:
        return int(flags.sum(1).max()) if flags.numel() else 0
    intervals = [pattern.runs(context, "q") for pattern in tokens]
    known = [keys.some for keys in intervals if keys is not None]
    if len(known) < len(intervals):
        return context.q_len
    return sum(stop - start for start, stop in unite(run for some in known for run in some))


class GlobalAttention(nn.Module):
    """Attention of global queries with separate projections, which replaces their rows of the output."""

    def __init__(self, hidden_size: int, config: AttentionConfig, layer: int, mechanism: SoftmaxConfig):
        super().__init__()
        self.head_size, self.heads, self.layer = config.width(hidden_size), config.num_attention_heads, layer
        self.mechanism, self.tokens = mechanism, split_global_tokens(mechanism.pattern)[1]
        inner, inner_kv = (number * self.head_size for number in (self.heads, config.kv_heads))
        bias = config.has_bias("query")
        self.query = Linear(hidden_size, inner, bias=bias)
        self.key = Linear(hidden_size, inner_kv, bias=bias)
        self.value = Linear(hidden_size, inner_kv, bias=bias)

    def forward(
        self,
        y: Tensor,
        x: Tensor,
        read: Tensor,
        context: Context,
        position: Position,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, KeyValueCache | None]:
        """Return y [B, H, Tq, D] with the rows of global queries computed with the global projections.

        x and read [B, Tq, E]: the inputs of the queries, and of the keys and values.
        """
        queries = context.once(("global queries", self.tokens), lambda: find_queries(self.tokens, context, x))
        if queries is None and cache is None:
            return y, None
        site = site_of(self.layer, self.query, self.key, self.head_size, self.heads)
        # Keys and values of all tokens, by the global projections: W_kg and W_vg.
        k, v = (split_heads(projection(read), self.head_size) for projection in (self.key, self.value))
        _, k = position.rotate(k, k, context, site)
        if cache is not None:
            k, v, cache = cache.append(k, v)
        if queries is None:
            return y, cache
        record_mark(
            GLOBAL, partial(_global_flags, queries, x.shape[1]), "queries", ("by projections of its own",)
        )
        index = queries.slots.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        # [B, G, E] -> [B, H, G, D]: only the global rows of x are projected to queries.
        q = split_heads(self.query(x.gather(1, index)), self.head_size)
        # The context of the gathered queries has their original positions.
        q, _ = position.rotate(q, q, queries.context, site)
        bias = self._bias(q, k, context, position, site, queries)
        if not recording():
            return replace_rows(y, self._attend(q, k, v, bias, queries), queries), cache
        with recorded() as weights:
            rows = self._attend(q, k, v, bias, queries)
        # Recorded weights contain the global queries' weights in their rows too.
        amend(lambda ordinary: replace_rows(ordinary, weights[0], queries))
        return replace_rows(y, rows, queries), cache

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, bias: ScoreMod | None, queries: GlobalQueries
    ) -> Tensor:
        return attend(
            q,
            k,
            v,
            mask_mod=queries.mask_mod,
            score_mod=bias,
            context=queries.context,
            scale=self.mechanism.scale,
            backend=self.mechanism.backend,
            dropout=self.mechanism.dropout if self.training else 0.0,
        )

    def _bias(
        self, q: Tensor, k: Tensor, context: Context, position: Position, site: Site, queries: GlobalQueries
    ) -> ScoreMod | None:
        """Return the position scheme's bias for the scores; `InputError` unless it is a bias by distance."""
        relative = position.relative(q, k, context, site)
        if position.score_mod(q, k, context, site) is not None or (
            relative is not None and set(relative.tables) != {"bias"}
        ):
            raise InputError(
                "global_projections: this position scheme depends on queries and keys, and global tokens "
                "have separate ones; use a scheme that rotates them (rope) or adds a bias (alibi, t5)"
            )
        if relative is None:
            return None
        assert relative.bias is not None
        table, places = relative.bias.expand(q.shape[1], -1), queries.slots + context.offset
        entry = lambda b, q_idx, kv_idx: relative.entry(places[b, q_idx] - kv_idx)  # noqa: E731
        add = broadcasts(lambda score, b, h, q_idx, kv_idx: score + table[h, entry(b, q_idx, kv_idx)])
        return step("bias of the distance")(add)


def _global_flags(queries: GlobalQueries, length: int) -> Tensor:
    """Return 0 for global queries, -1 for others: [B, 1, Tq]."""
    flags = torch.full((len(queries.slots), length), -1, device=queries.slots.device)
    return flags.scatter(1, queries.slots, queries.valid.long() - 1).unsqueeze(1)


def replace_rows(table: Tensor, rows: Tensor, queries: GlobalQueries) -> Tensor:
    """Return table [B, H, Tq, D] with the rows [B, H, G, D] of the global queries."""
    index = queries.slots.view(len(queries.slots), 1, -1, 1).expand(rows.shape)
    # Rows with fewer global queries get their original values back.
    original = table.gather(2, index)
    return table.scatter(2, index, torch.where(queries.valid[:, None, :, None], rows, original))


@torch.no_grad()
def copy_local_projections(model: nn.Module) -> None:
    """Initialize the global projections of every layer of `model` as copies of the ordinary projections.

    Longformer does this before training (Beltagy et al. 2020, section 5).
    """
    for module in model.modules():
        target = getattr(module, "global_attention", None)
        if isinstance(target, GlobalAttention):
            for name in ("query", "key", "value"):
                target.get_submodule(name).load_state_dict(module.get_submodule(name).state_dict())
