"""Memory-compressed attention: queries attend to keys and values shortened by a strided convolution.

    k'_s = sum_t k_(s stride + t) W_k^t        t = 0 .. kernel - 1, and v' likewise
    y = softmax(q k'^T / sqrt(D)) v'

Each head has its own kernels, [kernel, D, D] over its D dimensions, without a bias: a grouped convolution
with a group per head. A causal query attends to the slots that end at or before it. Liu et al. 2018, section
4.2.5; their T-DMCA alternates it with attention within blocks (`alternate`).

The paper has no relative positions. Here a slot has the position of its last token: a position scheme treats
a query and a slot like the query and that token, with the compressed key and value of the slot.

The paper does not define what the first kernel - 1 tokens of a document attend to: here to the document's
first token, which is not convolved, and so do all later tokens. Positions are counted within documents
(`compressed_slots`), so padding and packing have no influence. Computed in at least float32. Cost: n / stride
keys per query, and 2 n D kernel / stride products per dimension of keys and of values. The state is the slots
so far and the last kernel - 1 tokens: a third of a KV cache with stride 3.

The definition computes slot by slot and is the reference for tests. Without causality the last slots of a
document treat missing tokens as zeros.
"""

import dataclasses
import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.documents import documents_of_row, take_tokens
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.mechanisms.base import (
    Heads,
    Mechanism,
    MechanismConfig,
    PositionTerms,
    check_head_size,
)
from polyformer.attention.mechanisms.compressed_slots import (
    SlotWindows,
    VisibleSlots,
    attend_with_terms,
    new_slots,
    score_mod,
)
from polyformer.attention.mechanisms.pair_terms import PairTerms, add_terms, weighted_values
from polyformer.core.instrumentation import SlotKeys, record_lookup
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.softmax import softmax
from polyformer.core.ranges import PositiveInt, Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCompressedConfig(MechanismConfig):
    """Memory-compressed attention: a strided convolution shortens keys and values.

    `kernel`: the number of tokens per slot; `stride`: the number of tokens between the starts of consecutive
    slots.
    """

    kernel: PositiveInt = 3
    stride: PositiveInt = 3
    dropout: Probability = 0.0  # of attention weights
    backend: str = "auto"  # of `attend`; "definition" computes slot by slot

    kind: ClassVar[str] = "memory_compressed"
    paper: ClassVar[str] = "Liu et al. 2018 (T-DMCA), section 4.2.5"
    pairs: ClassVar[bool] = False

    def build(self, num_heads: int, head_size: int) -> "MemoryCompressed":
        return MemoryCompressed(self, num_heads, head_size)

    @classmethod
    def examples(cls) -> tuple["MemoryCompressedConfig", ...]:
        return cls(), cls(kernel=4, stride=2), cls(kernel=1, stride=2)


@dataclasses.dataclass(frozen=True)
class CompressedState(State):
    """The slots so far and the last tokens.

    Args:
        slots: keys and values of the slots.
        ends: [B, S], the key slot that completes each slot.
        keys, values: [B, H, kernel - 1, D], the last tokens, which later windows may contain.
        places: [B, kernel - 1], the key slots of the last tokens.
    """

    slots: KeyValueCache
    ends: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    places: Tensor | None = None


class MemoryCompressed(Mechanism):
    """Softmax attention to compressed keys and values."""

    def __init__(self, config: MemoryCompressedConfig, num_heads: int, head_size: int):
        super().__init__()
        check_head_size(head_size)
        self.config = config
        shape = num_heads, config.kernel, head_size, head_size
        deviation = 1 / math.sqrt(config.kernel * head_size)
        self.key_kernel = nn.Parameter(torch.empty(shape).normal_(0.0, deviation))
        self.value_kernel = nn.Parameter(torch.empty(shape).normal_(0.0, deviation))

    def new_state(self, reserve: int) -> State:
        """Return an empty state for `reserve` tokens: their slots, or the tokens for the definition."""
        if self.config.backend == "definition":
            return KeyValueCache(reserve=reserve)
        return CompressedState(KeyValueCache(reserve=-(-reserve // self.config.stride)))

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Attend to the slots that the convolution computes from keys and values."""
        dtype = q.dtype
        q, k, v = (at_least_float32(x) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        with without_autocast(q):
            k, v, visible, state = self._compress(k, v, context, state)
        terms = PairTerms.of(position, q.to(dtype), k, context, q.shape[3] ** -0.5)
        with without_autocast(q):
            y = self._attend(Heads(q, k, v), visible, terms)
        return y.to(dtype), state

    def _compress(
        self, k: Tensor, v: Tensor, context: Context, state: State | None
    ) -> tuple[Tensor, Tensor, VisibleSlots, State | None]:
        """Return keys and values of all slots up to the new tokens, their mask, and the next state."""
        if self.config.backend == "definition":
            k, v, state = appended(state, k, v)
            slots = torch.arange(context.kv_len, device=k.device).unsqueeze(0)
            return k, v, VisibleSlots.of(context, slots), state
        fresh = k.shape[2]
        past = state if isinstance(state, CompressedState) else None
        if past is not None and past.keys is not None and past.values is not None:
            # A window may begin with tokens of earlier calls.
            k, v = torch.cat([past.keys, k], 2), torch.cat([past.values, v], 2)
        new, visible = self._plan(context, past, fresh, k.device)
        if past is None or past.ends is None:
            record_lookup(lambda: SlotKeys(new.tokens(context.kv_len)))
        keys, values = self._slots(k, self.key_kernel, new), self._slots(v, self.value_kernel, new)
        if past is not None:
            keys, values, cache = past.slots.append(keys, values)
            rows = len(k)
            state = CompressedState(
                cache,
                visible.ends.expand(rows, -1),
                take_tokens(k, new.tail),
                take_tokens(v, new.tail),
                new.tail_slots.expand(rows, -1),
            )
        return keys, values, visible, state

    def _attend(self, heads: Heads, visible: VisibleSlots, terms: PairTerms | None) -> Tensor:
        if self.config.backend == "definition":
            kernels = self.key_kernel, self.value_kernel
            return definition(heads, kernels, self.config.stride, visible.context, terms)
        dropout = self.config.dropout if self.training else 0.0
        if terms is not None and terms.has_vectors:
            return attend_with_terms(heads, visible, terms, dropout)
        q, k, v = heads
        return attend(
            q,
            k,
            v,
            mask_mod=visible.mask,
            layout=visible.keys,
            score_mod=None if terms is None else score_mod(visible, terms, q.shape[1]),
            context=Context(q.shape[2], k.shape[2], q_start=0),
            dropout=dropout,
            backend=self.config.backend,
        )

    def _plan(
        self, context: Context, past: CompressedState | None, fresh: int, device: torch.device
    ) -> tuple[SlotWindows, VisibleSlots]:
        """Return the slots that the new tokens complete, and the mask of all slots; all layers share them."""

        def make() -> tuple[SlotWindows, VisibleSlots]:
            slots = torch.arange(context.kv_len - fresh, context.kv_len, device=device).unsqueeze(0)
            if past is not None and past.places is not None:
                slots = torch.cat([past.places, slots.expand(len(past.places), -1)], 1)
            # Without padding and documents all batch rows have the same slots.
            alike = context.kv_valid is None and context.kv_doc is None
            if alike and past is not None and past.places is not None:
                slots = slots[:1]
            rows = 1 if alike else max(context.num_rows, len(slots))
            new = new_slots(context, slots.expand(rows, -1), fresh, self.config.kernel, self.config.stride)
            ends = new.ends
            if past is not None and past.ends is not None:
                before = past.ends[:1] if alike else past.ends
                ends = torch.cat([before, ends.expand(len(before), -1)], 1)
            return new, VisibleSlots.of(context, ends)

        # The number of earlier slots is part of the key: it decides the size of the mask.
        known = 0 if past is None or past.ends is None else past.ends.shape[1]
        return context.once(("compressed", self.config.kernel, self.config.stride, past is None, known), make)

    def _slots(self, x: Tensor, kernel: Tensor, new: SlotWindows) -> Tensor:
        """Return the slots [B, H, S, D] of tokens x [B, H, J, D]."""
        x = torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2)  # for missing tokens
        # [B, H, S kernel, D] -> [B, H, S, kernel, D]
        windows = take_tokens(x, new.index.flatten(1)).unflatten(2, new.index.shape[1:])
        # The convolution is one product: [B, H, S, kernel D] @ [H, kernel D, D].
        convolved = windows.flatten(3) @ kernel.flatten(1, 2).to(x.dtype)
        return torch.where(new.unconvolved[:, None, :, None], windows[:, :, :, -1], convolved)


@dataclasses.dataclass(frozen=True)
class SlotWindow:
    """The tokens of a slot, or a single token that is not convolved."""

    tokens: list[int]
    unconvolved: bool = False


def definition(
    heads: Heads,
    kernels: tuple[Tensor, Tensor],
    stride: int,
    context: Context,
    terms: PairTerms | None,
) -> Tensor:
    """Return the attention output [B, H, Tq, D].

    Args:
        heads: as many for keys as for queries.
        kernels: [H, kernel, D, D], for keys and for values.
        stride: the number of tokens between the starts of consecutive slots.
        context: describes the queries and keys.
        terms: the terms of a position scheme, None for none.
    """
    q, k, v = heads
    size, rows = kernels[0].shape[1], []
    for b in range(len(q)):
        slots = [
            slot for tokens in documents_of_row(context, b) for slot in _slots(tokens, size, stride, context)
        ]
        # [Tq, S]
        attended = [[_attends(context, b, i, slot) for slot in slots] for i in range(q.shape[2])]
        allowed = torch.tensor(attended, dtype=torch.bool, device=q.device).view(q.shape[2], len(slots))
        keys, values = (
            torch.stack([_convolve(x[b], kernel, slot) for slot in slots], 1) if slots else x[b][:, :0]
            for x, kernel in zip((k, v), kernels)
        )
        # A slot has the position of its last token.
        places = torch.tensor([slot.tokens[-1] for slot in slots], dtype=torch.long, device=q.device)
        rows.append((keys, values, allowed, places))
    most = max(len(places) for *_, places in rows)  # pad rows with masked slots
    columns = list(zip(*rows))
    keys, values = (
        torch.stack([F.pad(x, (0, 0, 0, most - x.shape[1])) for x in part]) for part in columns[:2]
    )
    allowed, places = (torch.stack([F.pad(x, (0, most - x.shape[-1])) for x in part]) for part in columns[2:])
    scores = add_terms(q @ keys.mT / math.sqrt(q.shape[3]), q, keys, terms, places)
    weights, _ = softmax(scores, allowed.unsqueeze(1))
    return weighted_values(weights, values, terms, places)


def _slots(tokens: list[int], size: int, stride: int, context: Context) -> list[SlotWindow]:
    """Return the slots of a document's tokens."""
    slots = [SlotWindow(tokens[start : start + size]) for start in range(0, len(tokens), stride)]
    if not context.causal:
        return slots
    # An incomplete window at the end is not visible to any causal query.
    return [SlotWindow(tokens[:1], unconvolved=True), *(slot for slot in slots if len(slot.tokens) == size)]


def _convolve(x: Tensor, kernel: Tensor, slot: SlotWindow) -> Tensor:
    """Return sum_t x_t W^t [H, D] over the slot's tokens of x [H, T, D]."""
    if slot.unconvolved:
        return x[:, slot.tokens[0]]
    terms = [
        torch.einsum("hd,hde->he", x[:, token], kernel[:, t].to(x.dtype))
        for t, token in enumerate(slot.tokens)
    ]
    return torch.stack(terms).sum(0)


def _attends(context: Context, b: int, query: int, slot: SlotWindow) -> bool:
    """Return whether the slot is in the query's document and, in the causal form, complete."""
    last = slot.tokens[-1]
    own, other = context.q_doc, context.kv_doc
    same = own is None or other is None or bool(own[b, query] == other[b, last])
    return same and (not context.causal or last <= query + context.offset)
