"""The Memorizing Transformer: a layer near the top attends to the nearest old keys and their values.

    K = k / |k|, V = v             for every earlier token, before positions: the store, without gradient
    s_j = t_h (q / |q|) . K_j      the `neighbours` entries j of the largest s, exactly
    y   = g_h softmax(s) V + (1 - g_h) y_local,    g_h = sigmoid(gate_h)

with q, k, v of this layer, y_local the output of its attention to the segment and the memory before it, and a
temperature t_h > 0 and a gate g_h for each query head: a mixture of two softmaxes, not a softmax over both.
All other layers, and local attention, are as in Transformer-XL (`recurrent.py`), so that a store can be added
to a trained model. Wu et al. 2022, section 3.

A segment is a call. A token can be looked up when its segment is complete and attention no longer reaches it,
which means that it is no longer among the last `length` tokens. Thus nothing is seen twice, and if the memory
covers the text, any split into segments is equivalent to a single pass. With `length=0` all tokens of earlier
segments can be looked up. The store has the last `store` of them, only from the row's present document,
without padding; a full store drops its oldest entry. The output for a query without entries is y_local.

Costs `store` keys and values per row for this layer, and for every query `store` products of width D.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from polyformer.attention.positions import Shape
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import Lookup, record_lookup, record_mark
from polyformer.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt, check_range
from polyformer.core.sequence.context import Context
from polyformer.core.state import State
from polyformer.nn.memory.base import MemoryConfig, MemoryLayer
from polyformer.nn.memory.recurrent import Recurrent
from polyformer.nn.memory.store import SEARCHES, Search, Store, StoreWindow, gather_entries

TEMPERATURE = 16.0
"""The temperature of a new model. Products of unit vectors are between -1 and 1 (Henry et al. 2020 start with
this value for 500 keys)."""

ADDED_TEMPERATURE = 32.0
"""The temperature for a model that was trained without a store: about |q| |k| / sqrt(D) of its heads (26 to
54 in the layers 11 to 22 of SmolLM2-135M)."""

ADDED_GATE = -4.0
"""The gate of a store that is added to a trained model: 0.018 of the heads' output."""

Trains = Literal["model", "memory", "layer", "above"]

STEP_SCALE = 10.0
"""The divisor of stored gates and temperatures. Adam moves a parameter by at most its learning rate, and
these values must change more than the entries of a matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorizingConfig(MemoryConfig):
    """Memorizing memory: one layer looks up nearest keys in a store of earlier tokens.

    Every layer has the last `length` tokens, and one layer has a store of `store` more, looked up by content.

    neighbours: number of entries for each query. layer: from 0; by default at three fourths of the depth.
    gate: before the sigmoid, and temperature: initial values; by default 0 and 16, or -4 and 32 in a model
    that was trained without a store. search: tiled, plain (the definition) or faiss, all exact. trains: all
    of the model, or only gates and temperatures (`memory`), also their `layer`, also all layers `above`.
    Frozen layers below need no backward pass. sinks: the number of tokens at the start of every segment that
    are not stored (only with `length=0`): a checkpoint that was trained without a memory uses the first token
    as an attention sink (Xiao et al. 2024), and its short key, at unit length, is nearer to most queries than
    all others.
    """

    length: NonNegativeInt = 128
    store: NonNegativeInt = 8192
    neighbours: PositiveInt = 32
    layer: int | None = None
    gate: float | None = None
    temperature: PositiveFloat | None = None
    search: Search = "tiled"
    trains: Trains = "model"
    sinks: NonNegativeInt = 0

    kind: ClassVar[str] = "memorizing"
    paper: ClassVar[str] = "Wu et al. 2022 (Memorizing Transformers), section 3"

    def __post_init__(self) -> None:
        if self.sinks and self.length:
            raise InputError(
                f"memory.sinks: expected 0, or a positive number with length=0, got {self.sinks}"
            )

    @classmethod
    def examples(cls) -> tuple["MemorizingConfig", ...]:
        return cls(), cls(layer=0, search="plain")

    def build(self, shape: Shape) -> "Memorizing":
        return Memorizing(self, shape)


class Memorizing(Recurrent):
    """A recurrent memory with a store. `size`: the number of entries to search, variable at any time."""

    has_store = True

    def __init__(self, config: MemorizingConfig, shape: Shape):
        super().__init__(config.length)
        layers = shape.num_layers
        self.layer = max(0, layers * 3 // 4 - 1) if config.layer is None else config.layer
        if not 0 <= self.layer < layers:
            raise InputError(f"memory.layer: expected 0 to {layers - 1}, got {config.layer}")
        self.size, self.neighbours, self.search = config.store, config.neighbours, config.search
        self.trains, self.sinks = config.trains, config.sinks
        self.initial = config.gate, config.temperature
        self.gate = nn.Parameter(torch.empty(shape.num_heads))
        self.temperature = nn.Parameter(torch.empty(shape.num_heads))
        self._init_parameters(0.0, TEMPERATURE)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the maximum sizes of the memory and the store."""
        return {**super().sizes, "store_size": self.size}

    def init_added(self) -> None:
        """Initialize a memory that is added to a trained model, with nearly closed gates."""
        self._init_parameters(ADDED_GATE, ADDED_TEMPERATURE)

    def _init_parameters(self, gate: float, temperature: float) -> None:
        """Initialize all heads with the values of the configuration, or else with these values."""
        chosen_gate, chosen_temperature = self.initial
        gate = gate if chosen_gate is None else chosen_gate
        temperature = temperature if chosen_temperature is None else chosen_temperature
        # Stored divided by STEP_SCALE, the temperature as its logarithm, which keeps it positive.
        nn.init.constant_(self.gate, gate / STEP_SCALE)
        nn.init.constant_(self.temperature, math.log(temperature) / STEP_SCALE)

    def trained_modules(self, layers: Sequence[nn.Module]) -> list[nn.Module] | None:
        """Return the trained parts according to `trains`; None for all."""
        if self.trains == "model":
            return None
        # Layers below the store see no change of their input, so they may stay frozen.
        stop = {"memory": self.layer, "layer": self.layer + 1, "above": len(layers)}[self.trains]
        return [self, *layers[self.layer : stop]]

    def new_store(self, layer: int) -> Store | None:
        """Return an empty store for the layer that has the store."""
        return Store() if layer == self.layer else None

    def update_store(self, store: State, x: Tensor, layer: MemoryLayer, context: Context) -> Store:
        """Return the store with the keys and values of the segment. It keeps `length` entries more than
        `size`, because the memory may cover the last `length`."""
        assert isinstance(store, Store)
        if self.sinks:
            x, keys = x[:, self.sinks :], context.kv_len
            if not x.shape[1]:
                return store
            documents = None if context.q_doc is None else context.q_doc[:, self.sinks :]
            context = Context(
                x.shape[1], keys, q_doc=documents, kv_doc=context.kv_doc, kv_valid=context.kv_valid
            )
        # Keys are stored at unit length, so that products are cosines.
        keys, values = layer.keys_and_values(x)
        return store.append(F.normalize(keys, dim=-1), values, context, self.size + self.length)

    def mix_with_store(self, y: Tensor, q: Tensor, store: State, context: Context) -> Tensor:
        """Return the mixture of y and the retrieved values, as above; q [B, H, T, D] before positions."""
        assert isinstance(store, Store)
        rows, windows = [], store.windows(context, self.size)
        record_mark("gate of the store", lambda: self._gates(windows, q), "queries")
        for row, window in enumerate(windows):
            local, queries, count = y[row], q[row], window.queries
            if window.start == window.stop or not count:
                rows.append(local)
                continue
            assert store.keys is not None
            assert store.values is not None
            keys, values = (
                part[row, :, window.start : window.stop].to(q.dtype) for part in (store.keys, store.values)
            )
            seen = functools.partial(_seen, store, row, window.start, q.shape[2])
            retrieved = self._attend_to_store(queries[:, :count], keys, values, seen).to(y.dtype)
            # g_h [H, 1, 1], one gate per head for all tokens.
            gate = (STEP_SCALE * self.gate).sigmoid().to(y.dtype)[:, None, None]
            # y = g_h softmax(s) V + (1 - g_h) y_local.
            mixed = gate * retrieved + (1 - gate) * local[:, :count]
            rows.append(torch.cat([mixed, local[:, count:]], 1))
        # Rows have stores of different lengths, so they are computed one by one.
        y = torch.stack(rows) if rows else y
        if self.trains == "memory":  # the loss has a graph even if no query finds an entry
            y = y + 0 * (self.gate.sum() + self.temperature.sum()).to(y.dtype)
        return y

    def _gates(self, windows: Sequence[StoreWindow], q: Tensor) -> Tensor:
        """Return the share of the store in each head's output, [B, H, T]; 0 for queries without entries."""
        gates = q.new_zeros(q.shape[:3])
        for own, window in zip(gates, windows):
            if window.start < window.stop:
                own[:, : window.queries] = (STEP_SCALE * self.gate).sigmoid().unsqueeze(1)
        return gates

    def _attend_to_store(
        self, q: Tensor, keys: Tensor, values: Tensor, seen: Callable[[], StoreWindow]
    ) -> Tensor:
        """Return the attention [H, T, D] of q [H, T, D] to its nearest keys and values [Hkv, N, D].

        seen: see `_seen`, for a record.
        """
        (heads, length, _), kv_heads = q.shape, len(keys)
        # s_j = t_h (q / |q|) . K_j; the stored keys have unit length already.
        q = F.normalize(q, dim=-1)
        with torch.no_grad():
            # Query heads of a key head search the same keys: [Hkv, (H / Hkv) T, D].
            grouped = q.reshape(kv_heads, heads // kv_heads * length, -1)
            scores, places = SEARCHES[self.search](grouped, keys, self.neighbours)
        # The search has no graph, so the scores of the entries are computed again with one.
        if torch.is_grad_enabled():
            near = gather_entries(keys, places).view(heads, length, -1, keys.shape[2])
            scores = (near @ q.unsqueeze(-1)).squeeze(-1)
        temperature = (STEP_SCALE * self.temperature).exp()[:, None, None]
        weights = (scores.view(heads, length, -1) * temperature).softmax(-1).to(values.dtype)
        record_lookup(lambda: _lookup(weights, places.view_as(weights), seen()))
        near = gather_entries(values, places).view(heads, length, -1, values.shape[2])
        return (weights.unsqueeze(-2) @ near).squeeze(-2)


def _seen(store: Store, row: int, start: int, queries: int) -> StoreWindow:
    """Return the start of a row's entries among all its stored entries, their number, and the queries."""
    first, end = (0 if x is None else int(x[row]) for x in (store.first, store.end))
    return StoreWindow(start - first, end - first, queries)


def _lookup(weights: Tensor, places: Tensor, seen: StoreWindow) -> Lookup:
    """Return the entries of a row's queries, [H, T, k] both, counted from the oldest entry of the store."""
    rows = torch.arange(seen.queries, device=weights.device)
    return Lookup(
        "retrieved from the store",
        weights.detach().unsqueeze(0),
        seen.stop,
        (places + seen.start).unsqueeze(0),
        torch.where(rows < weights.shape[1], rows, -1).unsqueeze(0),
    )


def set_store(model: nn.Module, size: int) -> None:
    """Set the size of every store in `model`; raises `InputError` if there is none."""
    check_range("memory.store", size, Ge(0))
    memories = [module for module in model.modules() if isinstance(module, Memorizing)]
    if not memories:
        raise InputError(
            "store_size: this model has no store; use the memory 'memorizing', or leave store_size out"
        )
    for memory in memories:
        memory.size = size
