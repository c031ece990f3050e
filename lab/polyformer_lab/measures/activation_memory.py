"""The memory of a training step's activations, by depth and wiring (Gomez et al. 2017, section 3)."""

import dataclasses
import functools
import os
import unittest.mock
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from polyformer.core.measuring import MIB
from polyformer.core.sequence.context import Context
from polyformer.nn.block import BlockConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.stack import AttentionConfig, Stack, StackConfig, build_stack
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.memory import peak_mib

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""An environment in which the C library of Linux returns freed memory immediately: otherwise it keeps holes,
more for each layer.
"""


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder and the row that it is trained on."""

    block: str
    layers: int
    width: int
    heads: int
    length: int
    dropout: float
    device: str = "cpu"


@measurement()
def activation_memory(
    cell: Cell,
    block: str,
    layers: int,
    width: int,
    heads: int,
    length: int,
    dropout: float,
    device: str = "cpu",
) -> Row:
    """Return the MiB that the forward pass saves for the backward pass, and the MiB at the peak of both.

    The peak is measured in a separate process, without the gradients of the parameters.
    """
    size = Size(block, layers, width, heads, length, dropout, device)
    return {"kept": kept_mib(size), "peak": _peak(size)}


def built(size: Size) -> tuple[Stack, Callable[[], Tensor]]:
    """Return a stack in training mode and its forward pass, which returns a scalar."""
    torch.manual_seed(0)
    config = StackConfig(
        num_hidden_layers=size.layers,
        attention=AttentionConfig(num_attention_heads=size.heads),
        feedforward=DenseConfig(intermediate_size=4 * size.width),
        block=BlockConfig.from_dict(size.block),
        dropout=size.dropout,
    )
    stack = build_stack(config, size.width, size.length).to(size.device).train()
    x = torch.randn(1, size.length, size.width, device=size.device, requires_grad=True)
    pos = torch.arange(size.length, device=size.device)
    context = Context(size.length, size.length, causal=True)
    return stack, lambda: stack(x, pos, context)[0].square().mean()


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """The object that autograd saves instead of a tensor."""

    tensor: Tensor


def kept_mib(size: Size) -> float:
    """Return the MiB of the tensors, without the parameters, that the forward pass saves."""
    stack, forward = built(size)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in stack.parameters()}
    held: weakref.WeakSet[Saved] = weakref.WeakSet()  # entries disappear when their graph is freed

    def keep(tensor: Tensor) -> Saved:
        saved = Saved(tensor.detach())  # the tensor with its graph would refer to its own holder
        held.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved.tensor):
        value = forward()
    stores = (saved.tensor.untyped_storage() for saved in held)
    sizes = {store.data_ptr(): store.nbytes() for store in stores if store.data_ptr() not in parameters}
    del value  # keeps the graph and its saved tensors until here
    return sum(sizes.values()) / MIB


def _peak(size: Size) -> float:
    small = dataclasses.replace(size, length=16)
    gradients = sum(parameter.nbytes for parameter in built(small)[0].parameters()) / MIB
    with unittest.mock.patch.dict(os.environ, RETURNED):
        return peak_mib(_step, size, small, size.device) - gradients


def _step(size: Size) -> Callable[[], object]:
    return functools.partial(_train, *built(size))


def _train(stack: Stack, forward: Callable[[], Tensor]) -> None:
    stack.zero_grad(set_to_none=True)
    forward().backward()
