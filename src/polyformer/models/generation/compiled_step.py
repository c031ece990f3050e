"""Decoding steps as one graph, with `generate(..., compile=True)`.

In a step with one token, a model such as GPT-2 spends a third of its time on Python code and small operations
on a CPU, and nearly all of it on a GPU. The graph of a step has a cache of fixed capacity (`fixed_state`), so
it serves all steps with the same number of rows, or with fewer; other steps run as usual. On a CPU torch's
compiler joins everything, with `core.ops.row_product` as the product of a single row. Other products keep the
layouts of `core.ops.weight_layouts` and `core.ops.integer_products`. On a GPU the graph is a CUDA graph,
without a compiler.
"""

import functools
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention
from polyformer.attention.patterns import Causal, Full
from polyformer.core.errors import InputError, caution
from polyformer.core.instrumentation import collecting
from polyformer.models.generation.fixed_step import FixedStep
from polyformer.models.generation.packed_weights import PackedCopies
from polyformer.models.generation.step_graph import MOST_KEPT, StepGraph, keep, take
from polyformer.models.outputs import ModelState

LEAST_CAPACITY = 64
"""The least capacity of a cache; every other capacity needs other code."""


GRAPH_FROM = 16
"""New tokens from which a CUDA graph repays its capture, which takes as long as about ten steps without."""

LONG = 1000
"""New tokens from which 10 seconds of compiling on a CPU repay, for one text of a model like GPT-2."""


def captures_by_default(model: Any, device: torch.device, new_tokens: int) -> bool:
    """Return whether a generation that does not ask for a graph gets one: on CUDA, if the model has a graph.

    On a CPU a long generation is told once that it could ask.
    """
    if device.type != "cuda":
        if new_tokens >= LONG and device.type == "cpu" and _is_compilable(model):
            _suggest_graph()
        return False
    return new_tokens >= GRAPH_FROM and _is_compilable(model)


def _is_compilable(model: Any) -> bool:
    """Return whether a model has steps with a graph."""
    try:
        check_compilable(model)
    except InputError:
        return False
    return True


@functools.cache
def _suggest_graph() -> None:
    caution(
        f"generate: texts of {LONG} tokens and more are faster on a CPU with compile=True, after 10 seconds "
        "of compiling"
    )


@functools.cache
def _warn_of_failed_graph(reason: str) -> None:
    caution(
        f"generate: the graph of a step could not be recorded ({reason}), so steps run one by one; pass "
        "compile=False to leave it out"
    )


def capacity(length: int) -> int:
    """Return the capacity of a cache for texts of up to `length` tokens: a power of two."""
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())


def check_compilable(model: Any) -> None:
    """Raise `InputError` for a model with steps that have no graph of fixed size."""
    stack = model.decoder
    reason = None
    if not all(_has_fixed_size(layer.attention.mechanism) for layer in stack.sequence):
        reason = "only softmax attention that is dense or has a window reads a cache of fixed size"
    elif stack.position.adds_terms and any(reach is not None and reach.first for reach in stack.reaches):
        reason = "distances to global tokens, which the position scheme reads, differ from step to step"
    elif model.config.weights is not None and not next(model.parameters()).is_cpu:
        reason = f"{model.config.weights} products of a GPU are not part of a graph"
    elif stack.memory is not None or stack.depth is not None:
        reason = "a memory or a depth policy decides from step to step"
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        reason = "processes may exchange parts of a step"
    elif collecting() or any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    ):
        reason = "hooks and observers run in Python"
    if reason is not None:
        raise InputError(f"compile: expected a model with a compilable step, but {reason}; leave it out")


def _has_fixed_size(mechanism: Any) -> bool:
    """Return whether a layer's mechanism reads a cache of fixed size."""
    config = mechanism.config if isinstance(mechanism, SoftmaxAttention) else None
    return config is not None and (config.pattern in (None, Full(), Causal()) or config.reach is not None)


class CompiledSteps:
    """Reads steps of a model through one compiled graph.

    graph: in use since the second step, or the first if an earlier call has left it. buffers: the caches of
    the graph's rows that it used last. falls_back: whether steps run one by one, after a warning, if the
    graph cannot be recorded.
    """

    def __init__(self, model: Any, falls_back: bool = False):
        check_compilable(model)
        self.model, self.falls_back, self.has_failed = model, falls_back, False
        self.is_first = True
        self.graph: StepGraph | None = None
        self.buffers: list[Tensor] = []
        self.cleared: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # buffers by `id`

    def read(
        self,
        tokens: Tensor,
        state: ModelState,
        last: int,
        inputs: dict[str, Tensor],
        copies: PackedCopies | None,
    ) -> tuple[Tensor, Tensor, ModelState] | None:
        """Return the next-token logits [N, last, V] of tokens [N, T] after `state`, hidden states [N, T, E]
        and the next state; None for a step that the graph does not serve, and for the first without a graph.

        inputs: all inputs of the model besides the state, by name, `tokens` included. copies: of its weights.
        """
        step, is_first = FixedStep.of(tokens, state, last, inputs, self.model.decoder), self.is_first
        self.is_first = False
        if step is None or self.has_failed:
            return None
        if self.graph is None:
            self.graph = take(self.model, copies, step)
        if self.graph is None:
            return None if is_first else self._record_or_fall_back(step, copies)  # the first packs weights
        if not self.graph.serves(step):
            return None
        self._move(step, self.graph)
        rows = len(tokens)
        logits, hidden = self.graph.run(*self.graph.fitted(step), *self.buffers)
        return logits[:rows], hidden[:rows], step.next_state(self.buffers)

    def close(self) -> None:
        """Leave the graph for the next call."""
        if self.graph is not None:
            # Nobody asked for a graph by default, so less memory stays in use.
            keep(self.model, self.graph, 1 if self.falls_back else MOST_KEPT)
            self.graph = None

    def _record_or_fall_back(
        self, step: FixedStep, copies: PackedCopies | None
    ) -> tuple[Tensor, Tensor, ModelState] | None:
        """Read a step and record its graph; None if that fails and steps may run one by one."""
        try:
            return self._record(step, copies)
        except (InputError, RuntimeError) as error:
            if not self.falls_back:
                raise
            self.graph, self.has_failed = None, True
            _warn_of_failed_graph(str(error).partition("\n")[0])
            return None

    def _record(self, step: FixedStep, copies: PackedCopies | None) -> tuple[Tensor, Tensor, ModelState]:
        """Read a step and record its graph."""
        for cache, filled in zip(step.caches, step.filled):
            self._clear(cache, filled)
        self.graph, (logits, hidden) = StepGraph.record(self.model, copies, step)
        self.buffers = step.caches if self.graph.buffers is None else self.graph.buffers
        return logits, hidden, step.next_state(self.buffers)

    def _move(self, step: FixedStep, graph: StepGraph) -> None:
        """Let `buffers` hold the step's caches, and have as many rows as the graph."""
        rows = len(step.tokens)
        if graph.buffers is not None:
            self.buffers = graph.buffers
        elif rows == graph.rows:
            self.buffers = step.caches
            for cache, filled in zip(step.caches, step.filled):
                self._clear(cache, filled)
        elif not all(map(_same_memory, step.caches, self.buffers)):  # the rows that go on were copied
            self.buffers = [cache.new_zeros(graph.rows, *cache.shape[1:]) for cache in step.caches]
        for cache, buffer, filled in zip(step.caches, self.buffers, step.filled):
            if not _same_memory(cache, buffer):
                buffer[:rows, :, :filled].copy_(cache[:, :, :filled])

    def _clear(self, cache: Tensor, filled: int) -> None:
        """Fill free slots of a new buffer with zeros: a weight of 0 times uninitialized memory may be NaN."""
        if self.cleared.get(id(cache)) is not cache:
            cache[:, :, filled:].zero_()
            self.cleared[id(cache)] = cache


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
