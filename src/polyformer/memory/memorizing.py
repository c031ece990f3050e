"""The Memorizing Transformer: one layer near the top looks up old keys and values, the nearest alone.

    K = k / |k|, V = v             of every token that was read, before positions: the store, without gradient
    s_j = t_h (q / |q|) . K_j      the `neighbours` entries j of the largest s, exactly
    y   = g_h softmax(s) V + (1 - g_h) y_local,    g_h = sigmoid(gate_h)

with q, k, v of one layer, y_local what its attention finds in the segment and in the memory before it, and
a temperature t_h > 0 and a gate g_h for each query head: two softmaxes mixed, not one over both. All other
layers are Transformer-XL's (`recurrent.py`), local attention too, so that a model that had no store keeps it.
Wu et al. 2022, section 3.

A segment is a call. A token may be looked up when its segment is over and attention no longer reaches it,
that is when it is no longer among the last `length` tokens: nothing is seen twice, and where the memory
covers the text any split into segments is one pass. With `length=0` these are the tokens of all segments
before. The store has the last `store` of them, of the row's present document alone, without padding; full,
it drops its oldest entry. A query that finds nothing has y_local itself.

Costs `store` keys and values a row for one layer, and for every query as many products of width D.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError, unknown
from polyformer.core.marks import Lookup, mark, say
from polyformer.core.state import State
from polyformer.memory.base import MemoryConfig, Reader, check_length
from polyformer.memory.recurrent import Recurrent
from polyformer.memory.search import SEARCHES, Search, entries
from polyformer.memory.store import Store, Window
from polyformer.position import Shape
from polyformer.sequence.context import Context

TEMPERATURE = 16.0
"""Of a new model: products of unit vectors lie between -1 and 1 (as Henry et al. 2020 begin for 500 keys)."""

TRAINED = 32.0
"""Of a model that was trained without a store: about |q| |k| / sqrt(D) of its heads (26 to 54 in the layers
11 to 22 of SmolLM2-135M)."""

CLOSED = -4.0
"""The gate with which a store is added to a model that had none: 0.018 of what heads put out."""

Trains = Literal["model", "memory", "layer", "above"]

QUICK = 10.0
"""Gates and temperatures are kept divided by it: Adam moves a parameter by its rate at most, and these have
farther to go than the entries of a matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorizingConfig(MemoryConfig):
    """The last `length` tokens in every layer, and in one a store of `store` more, looked up by content.

    neighbours: entries a query attends to. layer: from 0; by default that at three fourths of the depth.
    gate: before the sigmoid, and temperature: as both begin; by default 0 and 16, in a model that was trained
    without a store -4 and 32. search: tiled, plain (the definition) or faiss, all exact. trains: all of the
    model, or gates and temperatures (`memory`), also their `layer`, also all layers `above`. What is frozen
    below them costs no backward pass. sinks: so many tokens at the start of every segment are not stored
    (with `length=0` only): a checkpoint that was trained without a memory rests its attention on the first
    token (Xiao et al. 2024), whose short key, at unit length, is nearer to most queries than all others.
    """

    length: int = 128
    store: int = 8192
    neighbours: int = 32
    layer: int | None = None
    gate: float | None = None
    temperature: float | None = None
    search: Search = "tiled"
    trains: Trains = "model"
    sinks: int = 0

    kind: ClassVar[str] = "memorizing"
    paper: ClassVar[str] = "Wu et al. 2022 (Memorizing Transformers), section 3"

    def __post_init__(self) -> None:
        check_length(self.length)
        check_store(self.store)
        if self.sinks < 0 or (self.sinks and self.length):
            raise InputError(f"memory.sinks: expected 0, or more with length=0, got {self.sinks}")
        if self.neighbours < 1:
            raise InputError(f"memory.neighbours: expected 1 entry or more, got {self.neighbours}")
        if self.search not in SEARCHES:
            raise unknown("memory.search", self.search, SEARCHES)
        if self.trains not in get_args(Trains):
            raise unknown("memory.trains", self.trains, get_args(Trains))
        if self.temperature is not None and not self.temperature > 0:
            raise InputError(f"memory.temperature: expected a number above 0, got {self.temperature}")

    @classmethod
    def examples(cls) -> tuple["MemorizingConfig", ...]:
        """With the fast search, and in the first layer with the plain one."""
        return cls(), cls(layer=0, search="plain")

    def build(self, shape: Shape) -> "Memorizing":
        """With a gate and a temperature for each head."""
        return Memorizing(self, shape)


class Memorizing(Recurrent):
    """`size`: how many entries are looked through at most; it may be changed at any time."""

    looks_up = True

    def __init__(self, config: MemorizingConfig, shape: Shape):
        super().__init__(config.length)
        layers = shape.num_layers
        self.layer = max(0, layers * 3 // 4 - 1) if config.layer is None else config.layer
        if not 0 <= self.layer < layers:
            raise InputError(f"memory.layer: expected 0 to {layers - 1}, got {config.layer}")
        self.size, self.neighbours, self.search = config.store, config.neighbours, config.search
        self.trains, self.sinks = config.trains, config.sinks
        self.begin = config.gate, config.temperature
        self.gate = nn.Parameter(torch.empty(shape.num_heads))
        self.temperature = nn.Parameter(torch.empty(shape.num_heads))
        self._begin(0.0, TEMPERATURE)

    @property
    def sizes(self) -> dict[str, int]:
        """As for every memory."""
        return {**super().sizes, "store_size": self.size}

    def added(self) -> None:
        """As for every memory: the gates nearly closed."""
        self._begin(CLOSED, TRAINED)

    def _begin(self, gate: float, temperature: float) -> None:
        """Every head with these, or with what the configuration says."""
        gate, temperature = (
            default if chosen is None else chosen for chosen, default in zip(self.begin, (gate, temperature))
        )
        nn.init.constant_(self.gate, gate / QUICK)
        nn.init.constant_(self.temperature, math.log(temperature) / QUICK)

    def trained(self, layers: Sequence[nn.Module]) -> list[nn.Module] | None:
        """As for every memory, by `trains`."""
        if self.trains == "model":
            return None
        stop = {"memory": self.layer, "layer": self.layer + 1, "above": len(layers)}[self.trains]
        return [self, *layers[self.layer : stop]]

    def new_store(self, layer: int) -> Store | None:
        """Empty, in its one layer."""
        return Store() if layer == self.layer else None

    def stored(self, store: State, x: Tensor, layer: Reader, context: Context) -> Store:
        """With the keys and values of the segment; as many as a memory may reach are kept beyond `size`."""
        assert isinstance(store, Store)
        if self.sinks:
            x, keys = x[:, self.sinks :], context.kv_len
            if not x.shape[1]:
                return store
            documents = None if context.q_doc is None else context.q_doc[:, self.sinks :]
            context = Context(
                x.shape[1], keys, q_doc=documents, kv_doc=context.kv_doc, kv_valid=context.kv_valid
            )
        keys, values = layer.keys_and_values(x)
        return store.append(F.normalize(keys, dim=-1), values, context, self.size + self.length)

    def mixed(self, y: Tensor, q: Tensor, store: State, context: Context) -> Tensor:
        """As above; q [B, H, T, D] before positions."""
        assert isinstance(store, Store)
        rows, windows = [], store.windows(context, self.size)
        mark("gate of the store", lambda: self._gates(windows, q), "queries")
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
            first, end = (0 if x is None else int(x[row]) for x in (store.first, store.end))
            seen = Window(window.start - first, end - first, q.shape[2])
            looked_up = self._looked_up(queries[:, :count], keys, values, seen).to(y.dtype)
            gate = (QUICK * self.gate).sigmoid().to(y.dtype)[:, None, None]
            mixed = gate * looked_up + (1 - gate) * local[:, :count]
            rows.append(torch.cat([mixed, local[:, count:]], 1))
        y = torch.stack(rows) if rows else y
        if self.trains == "memory":  # where no query finds anything, the loss still has a graph
            y = y + 0 * (self.gate.sum() + self.temperature.sum()).to(y.dtype)
        return y

    def _gates(self, windows: Sequence[Window], q: Tensor) -> Tensor:
        """How much of each head's output is looked up, [B, H, T]; 0 for queries that find nothing."""
        gates = q.new_zeros(q.shape[:3])
        for own, window in zip(gates, windows):
            if window.start < window.stop:
                own[:, : window.queries] = (QUICK * self.gate).sigmoid().unsqueeze(1)
        return gates

    def _looked_up(self, q: Tensor, keys: Tensor, values: Tensor, seen: Window) -> Tensor:
        """q [H, T, D] in keys and values [Hkv, N, D]: [H, T, D].

        seen: where the entries begin among all that are stored, how many these are, and all queries.
        """
        (heads, length, _), kv_heads = q.shape, len(keys)
        q = F.normalize(q, dim=-1)
        with torch.no_grad():
            grouped = q.reshape(kv_heads, heads // kv_heads * length, -1)
            scores, places = SEARCHES[self.search](grouped, keys, self.neighbours)
        if torch.is_grad_enabled():
            near = entries(keys, places).view(heads, length, -1, keys.shape[2])
            scores = (near @ q.unsqueeze(-1)).squeeze(-1)
        temperature = (QUICK * self.temperature).exp()[:, None, None]
        weights = (scores.view(heads, length, -1) * temperature).softmax(-1).to(values.dtype)
        say(lambda: _retrieved(weights, places.view_as(weights), seen))
        near = entries(values, places).view(heads, length, -1, values.shape[2])
        return (weights.unsqueeze(-2) @ near).squeeze(-2)


def _retrieved(weights: Tensor, places: Tensor, seen: Window) -> Lookup:
    """What a row's queries found, [H, T, k] both, counted from the oldest entry of the store."""
    rows = torch.arange(seen.queries, device=weights.device)
    return Lookup(
        "retrieved from the store",
        weights.detach().unsqueeze(0),
        seen.stop,
        (places + seen.start).unsqueeze(0),
        torch.where(rows < weights.shape[1], rows, -1).unsqueeze(0),
    )


def set_store(model: nn.Module, size: int) -> None:
    """Every store in `model` from now on of this size; `InputError` where there is none."""
    check_store(size)
    memories = [module for module in model.modules() if isinstance(module, Memorizing)]
    if not memories:
        raise InputError("store_size: this model has no store, as a memory 'memorizing' has; leave it out")
    for memory in memories:
        memory.size = size


def check_store(size: int) -> None:
    """Raises `InputError` for a store of less than nothing."""
    if size < 0:
        raise InputError(f"memory.store: counts entries, expected 0 or more, got {size}")
