"""The graph of a decoding step, kept with the model for the next call.

A graph is valid as long as recording would give the same graph: no attribute of a module has changed, no
parameter has moved, and no packed copy of the weights was dropped. Outdated copies of int8 weights, which are
attributes, were replaced while the model read the prompt.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops.autograd import autocast_device, is_autocast
from polyformer.core.recorded_graph import ValueReadError, record
from polyformer.models.generation.cuda_graph import CudaGraph
from polyformer.models.generation.fixed_step import FixedStep
from polyformer.models.generation.packed_weights import PackedCopies

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
