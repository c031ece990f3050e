"""A function of tensors as a graph of its operations, which runs without the function's Python code.

The function runs once, on real inputs. Tensors that are neither inputs nor computed from inputs, such as
weights, are constants of the graph. torch's compiler gets them as inputs, so its code is the same for all
models of a shape.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from polyformer.core.host_values import recorded
from polyformer.core.ops.compiled_code import compiled_graph

READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)
"""Operations with results that depend on values of tensors, not only on their shapes."""


Run = Callable[..., Sequence[Tensor]]
"""A graph as a function of its inputs."""


class ValueReadError(Exception):
    """The function reads a value of a tensor, so its operations may depend on the inputs."""


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedGraph:
    """A graph with the inputs of a function, then `constants`, as inputs. outputs: of the recorded call."""

    module: fx.GraphModule
    constants: list[Tensor]
    outputs: tuple[Tensor, ...]

    def compiled(self, inputs: Sequence[Tensor]) -> Run:
        """Return the graph compiled by Inductor, as a function of inputs of the same shapes as `inputs`.

        The first compilation takes many seconds. Code is shared by all equal graphs of a process, and kept
        for the next (`compiled_graph`). Raises `InputError` if torch cannot compile.
        """
        every = [*inputs, *self.constants]
        shapes = tuple((x.shape, x.stride(), x.dtype, x.device) for x in every)
        key = self.module.code, shapes
        if key not in _compiled:
            _compiled[key] = compiled_graph(self.module, every)
        run, constants = _compiled[key], self.constants
        return lambda *tensors: run(*tensors, *constants)


_compiled: dict[object, Run] = {}


def record(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]) -> RecordedGraph:
    """Return the graph of `function(*inputs)`; raises `ValueReadError` if it reads a value of a tensor."""
    recorder = _Recorder(inputs)
    token = recorded.set(True)
    try:
        with recorder:
            outputs = function(*inputs)
    finally:
        recorded.reset(token)
    return recorder.finished(outputs)


class GraphObject:
    """An object that an operation of a graph needs and that is not a tensor."""

    @functools.cached_property
    def key(self) -> Tensor:
        """The number of this object, an input of the operation."""
        number = next(_numbers)
        _by_key[number] = self
        return torch.tensor(number, device="cpu")


_numbers = itertools.count()
_by_key: WeakValueDictionary[int, GraphObject] = WeakValueDictionary()


def graph_object(key: Tensor) -> Any:
    """Return the object with this key."""
    return _by_key[cast(int, key.item())]


class _Recorder(TorchDispatchMode):
    """Records each operation as it runs."""

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}  # by the ids of tensors
        self.tensors: list[Tensor] = []  # kept, so that no id is used twice
        self.constants: list[Tensor] = []
        for tensor in inputs:
            self._add(tensor, self.graph.placeholder(f"x{len(self.tensors)}"))
        self.last_input: fx.Node = self.nodes[id(inputs[-1])]
        self.on_device = inputs[0].device.type != "cpu"

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        if self.on_device and _on_cpu((args, kwargs)):
            return func(*args, **kwargs)  # the same in every run: a constant of the graph
        if func in READS:
            raise ValueReadError(f"by {func}")
        outputs = func(*args, **kwargs)
        if self.on_device and _on_cpu(outputs):
            raise ValueReadError(f"by {func} to the CPU")
        node = self.graph.call_function(func, *tree_map(self._argument, (args, kwargs)))
        if isinstance(outputs, Tensor):
            self._add(outputs, node)
        elif isinstance(outputs, (tuple, list)):
            for index, output in enumerate(outputs):
                if isinstance(output, Tensor):
                    self._add(output, self.graph.call_function(operator.getitem, (node, index)))
        return outputs

    def finished(self, outputs: tuple[Tensor, ...]) -> RecordedGraph:
        """Return the graph, without operations that no output needs."""
        self.graph.output(tuple(map(self._argument, outputs)))
        self.graph.eliminate_dead_code()
        return RecordedGraph(fx.GraphModule(nn.Module(), self.graph), self.constants, outputs)

    def _add(self, tensor: Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.tensors.append(tensor)

    def _argument(self, value: Any) -> Any:
        """Return the node of a tensor; a tensor without a node is a constant."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.nodes:
            with self.graph.inserting_after(self.last_input):
                self.last_input = self.graph.placeholder(f"constant{len(self.constants)}")
            self.constants.append(value)
            self._add(value, self.last_input)
        return self.nodes[id(value)]


def _on_cpu(values: Any) -> bool:
    """Return whether there are tensors among nested values, all on the CPU."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return bool(tensors) and all(tensor.device.type == "cpu" for tensor in tensors)
