"""Peak memory, and time: of a training step by depth and wiring, and of Linformer's attention.

Gomez et al. 2017, section 3, state the memory of a training step's activations. Wang et al. 2020, table 3,
compare Linformer's attention with standard attention.
"""

import dataclasses
import functools
import os
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.mechanisms import LinformerConfig, SoftmaxConfig
from polyformer.attention.mechanisms.base import Mechanism
from polyformer.attention.positions import NoPositionConfig, Shape
from polyformer.core.measuring import MIB, median, time_interleaved
from polyformer.core.sequence.context import Context
from polyformer.nn.block import BlockConfig, PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.stack import AttentionConfig, Stack, StackConfig, build_stack
from polyformer.nn.stack.layer import Layer, LayerCall
from polyformer_lab.cells import Cell, Row, measurement
from polyformer_lab.costs import peak_mib

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


UNFUSED, SDPA = "unfused", "sdpa"


@dataclasses.dataclass(frozen=True)
class Call:
    """A forward pass to measure. k: rows of Linformer's matrices; 0 for standard attention."""

    level: str
    attention: str
    n: int
    k: int
    rows: int
    heads: int
    width: int
    device: str

    @property
    def small(self) -> "Call":
        """Return a smaller call that loads the same libraries."""
        return dataclasses.replace(self, n=256, k=min(self.k, 128), rows=1)


class Unfused(Mechanism):
    """An unfused attention mechanism: softmax(q k^T / sqrt(D)) v, one operation after the other."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, None]:
        """Return the output and no state."""
        return torch.softmax(q @ k.mT * q.shape[3] ** -0.5, -1) @ v, None


@measurement("attention")
def linformer_times(
    cell: Cell,
    level: str,
    n: int,
    ks: Sequence[int],
    faster: Sequence[float],
    smaller: Sequence[float],
    tokens: int,
    heads: int,
    width: int,
    unfused_limit: int,
    fused_up_to: int,
    memory: bool,
    repeats: int,
    device: str = "cpu",
) -> Iterator[Row]:
    """Yield the median time of each attention, and the speedup of Linformer over unfused attention.

    The last row has the number of factors of the paper that could be compared, and how many were not reached.

    Args:
        cell: the cell.
        level: "attention", from projected to mixed heads, or a whole "layer".
        n: tokens.
        ks: rows of Linformer's matrices; values below n are measured.
        faster: the paper's factors of time, by k.
        smaller: the paper's factors of memory, by k.
        tokens: tokens in a batch; for a small n it has several rows.
        heads: the number of heads.
        width: the head dimension.
        unfused_limit: MiB that the scores of unfused attention may take, twice.
        fused_up_to: the greatest n for the fused kernel, which takes too long beyond.
        memory: whether to measure the peak memory too.
        repeats: rounds; each times all calls in turn.
        device: the device.
    """
    rows = max(1, tokens // n)
    scores = rows * heads * n**2 * 4 * 2 / MIB  # and their softmax
    sizes = {UNFUSED: 0} if scores <= unfused_limit else {}
    sizes |= {SDPA: 0} if n <= fused_up_to else {}
    sizes |= {f"k={k}": k for k in ks if k < n}
    calls = {name: Call(level, name, n, k, rows, heads, width, device) for name, k in sizes.items()}
    peaks = {name: peak_mib(prepared, own, own.small, device) for name, own in calls.items() if memory}
    timed = time_interleaved({name: prepared(own) for name, own in calls.items()}, repeats)
    seconds = {name: median(own) for name, own in timed.items()}
    paper = dict(zip((f"k={k}" for k in ks), zip(faster, smaller)))
    for name, own in seconds.items():
        row: Row = {"attention": name, "milliseconds": 1e3 * own, "microseconds": 1e6 * own / (rows * n)}
        row |= {"peak_mib": peaks[name]} if memory else {}
        if name in paper and UNFUSED in seconds:
            row |= {"faster": seconds[UNFUSED] / own, "paper_faster": paper[name][0]}
            row |= {"smaller": peaks[UNFUSED] / peaks[name]} if memory and peaks[name] else {}
            row |= {"paper_smaller": paper[name][1]}
        yield row
    yield compared(seconds, {name: factor for name, (factor, _) in paper.items()})


def compared(seconds: dict[str, float], paper: dict[str, float]) -> Row:
    """Return how many of the paper's factors were measured, and how many of them not reached."""
    short = [
        seconds[UNFUSED] / seconds[name] < factor
        for name, factor in paper.items()
        if UNFUSED in seconds and name in seconds
    ]
    return {"compared": len(short), "below": sum(short)}


def prepared(call: Call) -> Callable[[], object]:
    """Return the forward pass with its inputs."""
    torch.manual_seed(0)
    context, size = Context(call.n, call.n), call.heads * call.width
    linformer = LinformerConfig(max_length=call.n, k=call.k, sharing="layer") if call.k else None
    mechanism = linformer or SoftmaxConfig(backend="sdpa")
    if call.level == "attention":
        alone = Unfused() if call.attention == UNFUSED else mechanism.build(call.heads, call.width)
        alone = alone.to(call.device)
        shape = call.rows, call.n, call.heads, call.width
        q, k, v = (torch.randn(shape, device=call.device).transpose(1, 2) for _ in range(3))
        return torch.no_grad()(lambda: alone(q, k, v, context, None, None))
    config = StackConfig(
        attention=AttentionConfig(num_attention_heads=call.heads, mechanism=mechanism),
        feedforward=DenseConfig(intermediate_size=4 * size, activation="gelu"),
        block=PreNormConfig(),
        dropout=0.0,
    )
    layer = Layer(size, config)
    if call.attention == UNFUSED:
        layer.attention.mechanism = Unfused()
    position = NoPositionConfig().build(Shape(hidden_size=size, num_heads=call.heads, head_size=call.width))
    layer = layer.to(call.device).eval()
    x = torch.randn(call.rows, call.n, size, device=call.device)
    return torch.no_grad()(lambda: layer(x, LayerCall(context, position)))
