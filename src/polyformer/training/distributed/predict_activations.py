"""The memory of the activations that a training pass saves, traced on the `meta` device without computation.

The trace runs the model's own forward pass, so every member is counted as implemented. Three things differ
from the real device and are corrected: autocast, which does not support `meta`; dropout, which keeps a mask
of one byte per element; and fused attention, which keeps queries, keys, values, the output and a number per
query.

For a layer as in GPT-2, per token, with B T tokens, hidden size E, inner size F, H heads:

    float32          norms, 2 (4 E + 8);  attention 4 (5 E + H);  feed-forward 4 (E + 2 F);  dropout 2 E
    bf16 by autocast norms, 2 (4 E + 8);  attention 2 (3 + 4) E + 4 H;  feed-forward 2 (E + 2 F);
                     dropout 2 E;  and a bf16 copy of every matrix, 2 (4 E E + 2 E F) bytes, for any batch

(norms keep their input, mean and deviation; under autocast queries, keys and values each have a copy of
their input). Korthikanti et al. 2022, section 4.1, count the same for attention that keeps its scores:
34 E + 5 H T bytes per token; flash attention (Dao et al. 2022) saves the 5 H T.

The chunked loss over the vocabulary is counted by its formula, and a pipeline by the passes in flight.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyformer.core.errors import InputError
from polyformer.core.sequence.context_parallel import ContextParallel, use_context_parallel
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.stack import Layer, StackConfig
from polyformer.nn.stack.multihead import MultiHeadAttention
from polyformer.training.config import PipelineSchedule
from polyformer.training.distributed.predict_local import FLOAT, meta_model

PRODUCTS = {
    F.linear,
    F.scaled_dot_product_attention,
    torch.matmul,
    torch.bmm,
    torch.mm,
    torch.einsum,
    torch.baddbmm,
    torch.addmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.bmm,
    Tensor.mm,
}
"""Operations that autocast computes in half precision."""

VALUE_READS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__float__: lambda x: math.inf,
    Tensor.__int__: lambda x: 0,
    Tensor.item: lambda x: math.inf,
    Tensor.__bool__: lambda x: True,
    Tensor.tolist: lambda x: torch.zeros(x.shape, dtype=x.dtype).tolist(),
}
"""Dummy results for code that reads values to choose among implementations with the same saved memory."""


@dataclass
class SavedActivations:
    """Bytes saved for the backward pass.

    layers: inside each layer, in the order of the calls, encoder first. inputs: the input of each layer,
    which is all that a recomputed layer saves. before and after: outside of the layers, for the embedding sum
    and for the modules after the last layer.
    """

    layers: list[int] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    before: int = 0
    after: int = 0


def trace_activations(
    config: ModelConfig,
    batch: int,
    length: int,
    half: bool,
    over: ContextParallel | None = None,
    joins: bool = True,
) -> SavedActivations:
    """Return `trace` of a model of `config`; of identical layers only two are traced and extrapolated.

    joins: whether small projections of one input may be one product; with tensor parallelism they are not.
    """
    sides = {name: stack for name in ("encoder", "decoder") if (stack := getattr(config, name)) is not None}
    alike = {name: _alike(stack) and stack.num_hidden_layers > 2 for name, stack in sides.items()}
    short = {
        name: dataclasses.replace(stack, num_hidden_layers=2) if alike[name] else stack
        for name, stack in sides.items()
    }
    model = meta_model(dataclasses.replace(config, **short))
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and not joins:
            module.has_equal_heads = False
    traced = trace(model, batch, length, half, over)
    layers, inputs, place = list[int](), list[int](), 0
    for name, stack in sides.items():
        number = short[name].num_hidden_layers
        more = stack.num_hidden_layers - number
        for whole, part in ((layers, traced.layers), (inputs, traced.inputs)):
            whole += part[place : place + number] + more * [part[place + number - 1]]
        place += number
    return dataclasses.replace(traced, layers=layers, inputs=inputs)


def _alike(stack: StackConfig) -> bool:
    """Return whether all layers of a stack have the same configuration."""
    parts = stack.attention.mechanism, stack.feedforward, stack.block
    layers = range(1, stack.num_hidden_layers)
    return stack.num_hidden_groups is None and all(
        part.for_layer(i) == part.for_layer(0) for part in parts for i in layers
    )


def trace(
    model: Transformer, batch: int, length: int, half: bool, over: ContextParallel | None = None
) -> SavedActivations:
    """Return the bytes that a pass of `model`, on the `meta` device, saves for [batch, length] tokens.

    An encoder-decoder reads the same number of source tokens. The loss of the head is not included. `half`:
    under autocast to bfloat16. over: the process and the context-parallel group over which the tokens are
    split.
    """
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids}
    if model.encoder is not None and model.decoder is not None:
        inputs["decoder_input_ids"] = ids
    recorder = _Recorder(model)
    handles = [
        handle for module in model.modules() if isinstance(module, Layer) for handle in recorder.hooks(module)
    ]
    try:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=half),  # read by the emulation
            _Emulated(),
            nullcontext() if over is None else use_context_parallel(over),
            torch.autograd.graph.saved_tensors_hooks(recorder.note, lambda x: x),
        ):
            output = model.train()(**inputs)
        del output
    except NotImplementedError as error:
        raise InputError(
            "mesh: what this model keeps for the backward pass depends on the numbers that it computes, so "
            "that nothing is predicted; measure a step on one process"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder.kept


class _Recorder:
    """A counter of saved memory, once per storage, without parameters, for the layer that saves it first."""

    def __init__(self, model: nn.Module):
        self.kept, self.inside = SavedActivations(), False
        self.own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.seen: dict[int, Tensor] = {}

    def note(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor."""
        key = tensor.untyped_storage()._cdata
        if key not in self.own and key not in self.seen:
            self.seen[key] = tensor
            self.add(tensor.untyped_storage().nbytes())
        return tensor

    def add(self, number: int) -> None:
        """Count `number` bytes."""
        if self.inside:
            self.kept.layers[-1] += number
        elif self.kept.layers:
            self.kept.after += number
        else:
            self.kept.before += number

    def hooks(self, layer: nn.Module) -> list[Any]:
        """Register hooks that record when `layer` runs."""

        def begin(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            self.inside = True
            self.kept.layers.append(0)
            self.kept.inputs.append(arguments[0].nbytes)

        def end(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            self.inside = False

        return [layer.register_forward_pre_hook(begin, with_kwargs=True), layer.register_forward_hook(end)]


class _Emulated(TorchFunctionMode):
    """Emulation of autocast, dropout and fused attention on `meta`, with the saved tensors of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, Tensor] = {}  # of weights, which autocast casts only once

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, or its emulation."""
        kwargs = kwargs or {}
        if func in PRODUCTS and torch.is_autocast_enabled("cpu"):
            args = tuple(map(self._cast, args))
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        if func in VALUE_READS and args[0].is_meta:
            return VALUE_READS[func](args[0])
        if func is F.dropout:
            return _Masked.apply(args[0])
        if func is F.scaled_dot_product_attention:
            return _fused(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._cast, value))
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if isinstance(value, nn.Parameter):
            return self.copies.setdefault(id(value), value.to(torch.bfloat16))
        return value.to(torch.bfloat16)


def _fused(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    return _Fused.apply(q, k, v, attn_mask)


class _Masked(torch.autograd.Function):
    """Dropout: saves one byte per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return an empty tensor of the shape of x."""
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise: the trace has no backward pass."""
        raise NotImplementedError


class _Fused(torch.autograd.Function):
    """Fused attention: saves q, k, v, the mask, the output and the log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return an empty output [..., Tq, Dv]."""
        *rows, heads, queries = q.shape[:-1]
        out = q.new_empty(*rows, queries, heads, v.shape[-1]).transpose(-2, -3)  # layout of the kernels
        sums = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        numbers = None if mask is None else torch.empty(mask.shape, dtype=q.dtype, device=q.device)
        ctx.save_for_backward(*(x for x in (q, k, v, numbers, out, sums) if x is not None))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Raise: the trace has no backward pass."""
        raise NotImplementedError


def loss_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes that the chunked loss over the vocabulary keeps of `tokens` labelled tokens.

    They are the gradients of hidden states and output matrix, which the forward pass computes, and the hidden
    states themselves. The loss does not keep its logits. 0 for heads that predict few labels. A masked
    language model labels one token in seven: gradients count for all tokens, hidden states for none.
    """
    if config.head.kind not in ("language_model", "masked"):
        return 0
    shape = config.head_shape()
    rows = shape.vocab_size + (2 * tokens if config.head.kind == "language_model" else tokens)
    return FLOAT * (shape.table_size or shape.hidden_size) * rows


def peak_activations(
    costs: Sequence[int], process: int, processes: int, passes: int, schedule: PipelineSchedule
) -> int:
    """Return the maximum bytes that a process keeps at once in a step of `passes` microbatches.

    Passes in flight: "gpipe" keeps all passes of a step; "1f1b" a pass for each stage from the current to the
    last, with several stages those started in the interleaved order. Narayanan et al. 2021, section 2.2.

    costs: bytes of one pass, for each of its stages in order. process: its rank along the pipeline.
    """
    if schedule == "gpipe":
        return passes * sum(costs)
    if len(costs) == 1:
        return min(processes - process, passes) * costs[0]
    together = passes // max(1, passes // processes)  # consecutive microbatches of one stage
    warm_up = (len(costs) - 1) * together + 2 * (processes - 1 - process)
    kept = most = 0
    for number in range(len(costs) * passes):
        kept += costs[number // together % len(costs)]
        most = max(most, kept)
        if number >= warm_up:
            kept -= costs[-1 - (number - warm_up) // together % len(costs)]
    return most
