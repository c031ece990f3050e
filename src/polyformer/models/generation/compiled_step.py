"""Decoding steps as one graph, with `generate(..., compile=True)`.

In a step with one token, a model such as GPT-2 spends a third of its time on Python code and small operations
on a CPU, and nearly all of it on a GPU. The graph of a step has a cache of fixed capacity (`fixed_step`), so
it serves all steps with the same number of rows, or with fewer; other steps run as usual. On a CPU torch's
compiler joins everything, with `core.ops.compiled_code.row_product` as the product of a single row. Other
products keep the layouts of `packed_weights` and of `core.ops.int8`. On a GPU the graph is a CUDA graph,
without a compiler.

A graph is kept with the model for the next call. It is valid as long as recording would give the same graph:
no attribute of a module has changed, no parameter has moved, and no packed copy of the weights was dropped.
Outdated copies of int8 weights, which are attributes, were replaced while the model read the prompt.

`CudaGraph` repeats all kernels of a function by one launch, without the time of launching each.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyformer.attention.mechanisms.softmax_attention import SoftmaxAttention
from polyformer.attention.patterns import Causal, Full
from polyformer.core.errors import InputError, caution
from polyformer.core.instrumentation import collecting
from polyformer.core.ops.autograd import autocast_device, is_autocast
from polyformer.core.recorded_graph import ValueReadError, record
from polyformer.models.generation.fixed_step import FixedStep
from polyformer.models.generation.packed_weights import PackedCopies
from polyformer.models.outputs import ModelState

WARM_UP = 2
"""Runs before the capture, in which libraries allocate their workspaces."""


class CudaGraph:
    """A function of tensors as a CUDA graph.

    inputs: copies of the inputs, which are the graph's memory. outputs: overwritten by every run.

    Args:
        function: any function of CUDA tensors that neither reads their values nor copies from the CPU. It may
            change inputs in place, if running it again on the changed inputs changes nothing.
        inputs: tensors of the forms of all calls.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]):
        self.inputs = [tensor.clone() for tensor in inputs]
        self.device = inputs[0].device
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    function(*self.inputs)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.outputs = function(*self.inputs)

    def run(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the function of tensors; what it changes in place changes in `inputs` only."""
        for own, x in zip(self.inputs, tensors, strict=True):
            if own is not x:
                own.copy_(x)
        with torch.cuda.device(self.device):
            self.graph.replay()
        return [output.clone() for output in self.outputs]


MOST_KEPT = 4
"""The most graphs kept with a model; on a GPU each has buffers for the KV cache."""


class Form(NamedTuple):
    """What a graph fixes of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> "Form":
        """Return the form of a tensor."""
        return cls(x.shape, x.stride(), x.dtype, x.device)


def is_captured(device: torch.device) -> bool:
    """Return whether steps on a device become CUDA graphs; on other devices Inductor compiles them."""
    return device.type == "cuda"


@dataclasses.dataclass(frozen=True, eq=False)
class StepGraph:
    """The graph of a step, for all steps of the same form with at most as many rows.

    names: of the inputs. others, caches: the forms of the step's tensors. run: the graph as a function of the
    tensors, which returns logits and hidden states. buffers: the caches of a CUDA graph, which reads no
    others; None for a graph that reads any.
    """

    contents: "ModelContents"
    rows: int
    last: int
    names: tuple[str, ...]
    others: list[Form]
    caches: list[Form]
    run: Callable[..., Sequence[Tensor]]
    buffers: list[Tensor] | None

    @classmethod
    def record(
        cls, model: Any, copies: PackedCopies | None, step: FixedStep
    ) -> tuple["StepGraph", tuple[Tensor, ...]]:
        """Run a step, and return its graph, its logits and its hidden states.

        Raises `InputError` if the step reads a value of a tensor.
        """
        tensors = [*step.others, *step.caches]
        try:
            graph = record(step.function(model), tensors)
        except ValueReadError as error:
            raise InputError(
                f"compile: expected a model with a compilable step, but values are read {error}; leave it out"
            ) from error
        if is_captured(step.tokens.device):
            module, constants = graph.module, graph.constants
            captured = CudaGraph(lambda *inputs: module(*inputs, *constants), tensors)
            run, buffers = captured.run, captured.inputs[-len(step.caches) :]
        else:
            run, buffers = graph.compiled(tensors), None
        forms = [*map(Form.of, step.others)], [*map(Form.of, step.caches)]
        contents, rows, names = ModelContents.of(model, copies), len(step.tokens), (*step.inputs,)
        return cls(contents, rows, step.last, names, *forms, run, buffers), graph.outputs

    def serves(self, step: FixedStep) -> bool:
        """Return whether the graph computes a step, with its tensors `fitted`."""
        if (self.last, self.names) != (step.last, (*step.inputs,)) or len(step.tokens) > self.rows:
            return False
        return self._fit(step.others, self.others, step) and self._fit(step.caches, self.caches, step)

    def _fit(self, tensors: list[Tensor], forms: list[Form], step: FixedStep) -> bool:
        rows = len(step.tokens), self.rows
        return len(tensors) == len(forms) and all(
            (x.dtype, x.device) == (own.dtype, own.device)
            and (x.shape == own.shape or (x.shape[1:] == own.shape[1:] and (len(x), own.shape[0]) == rows))
            for x, own in zip(tensors, forms)
        )

    def fitted(self, step: FixedStep) -> list[Tensor]:
        """Return the step's tensors other than caches in the graph's forms; more rows repeat the first."""
        return [
            x if (x.shape, x.stride()) == (own.shape, own.stride) else _fitted(x, own)
            for x, own in zip(step.others, self.others)
        ]


def _fitted(x: Tensor, form: Form) -> Tensor:
    missing = form.shape[0] - len(x)
    y = torch.empty_strided(form.shape, form.stride, dtype=x.dtype, device=x.device)
    return y.copy_(torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) if missing else x)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelContents:
    """What a graph depends on: attributes of modules, and the places of parameters."""

    objects: list[object]
    places: list[object]

    @classmethod
    def of(cls, model: nn.Module, copies: PackedCopies | None) -> "ModelContents":
        """Return the contents of a model, with the copies of its weights."""
        objects: list[object] = [] if copies is None else [*copies.kept.values()]
        for module in model.modules():
            for value in vars(module).values():
                objects += value.values() if isinstance(value, dict) else [value]
        tensors = [*model.parameters(), *model.buffers()]
        device = autocast_device(tensors[0])
        autocast = torch.get_autocast_dtype(device) if is_autocast(device) else None
        return cls(objects, [autocast, *((x.data_ptr(), x.dtype, x.device) for x in tensors)])

    def equals(self, other: "ModelContents") -> bool:
        """Return whether both have the same objects at the same places."""
        same = len(self.objects) == len(other.objects) and self.places == other.places
        return same and all(a is b for a, b in zip(self.objects, other.objects))


_kept: "WeakKeyDictionary[nn.Module, list[StepGraph]]" = WeakKeyDictionary()


def take(model: nn.Module, copies: PackedCopies | None, step: FixedStep) -> StepGraph | None:
    """Remove and return the model's graph for this step and its number of rows; None if there is none.

    Until `keep`, no other call uses the graph. Graphs that are no longer valid are dropped.
    """
    contents = ModelContents.of(model, copies)
    graphs = [graph for graph in _kept.pop(model, []) if graph.contents.equals(contents)]
    taken = next((x for x in graphs if x.rows == len(step.tokens) and x.serves(step)), None)
    _kept[model] = [graph for graph in graphs if graph is not taken]
    return taken


def keep(model: nn.Module, graph: StepGraph, most: int = MOST_KEPT) -> None:
    """Keep a graph for `take`, and at most `most` of a model, the last."""
    _kept[model] = [*_kept.get(model, []), graph][-most:]


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
