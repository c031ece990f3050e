"""A model in numbers: its cost at each length, and its parts with their parameters.

The cost is measured on the meta device, without computing any numbers. If the cost of a part depends on
numbers, the part states its assumptions for the meta device: clusters and experts of equal size, the spans of
a new model, tokens that pass all layers. A part of somebody else that reads numbers instead is measured in a
real pass.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.core.ops.product_kernels import counted_flops
from polyformer.core.ops.quantized import QuantizedWeight
from polyformer.models.architectures import Transformer, VisionTransformer


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one text, or image, of `length` tokens (for an encoder-decoder: a source and a target of
    that length).

    flops: floating-point operations of one forward pass with the logits of all tokens; a product and its sum
    are two, and masked pairs count if they are computed. activations: bytes in float32 saved for the backward
    pass, without attention weights (fused kernels save none) and logits. cache: bytes in float32 of keys and
    values saved in generation, None for an encoder and for a mechanism without a cache.
    """

    length: int
    flops: int
    activations: int
    cache: int | None


def cost(model: Transformer, length: int) -> Cost:
    """Return the cost of a `model`, on the meta device or, for parts that read numbers, on another."""
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, length, dtype=torch.long, device=device)}
    if model.encoder is not None and model.decoder is not None:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return _cost(model, inputs, length, _cache(model, inputs, length))


def image_cost(model: VisionTransformer) -> Cost:
    """Return the cost of an image for a `model` on the meta device; `length` counts its tokens."""
    config = model.config
    pixels = torch.zeros(1, config.num_channels, *config.image_size, device="meta")
    return _cost(model, {"pixel_values": pixels}, config.image(*config.image_size).length, None)


def _cost(model: Any, inputs: dict[str, Any], length: int, cache: int | None) -> Cost:
    with torch.no_grad(), counted_flops() as counter:
        # Not model(...): the counter's hooks would unpack the output, and compute the logits twice.
        _ = model.eval().forward(**inputs).logits
    return Cost(length, counter.get_total_flops(), _kept(model, inputs, length), cache)


def _kept(model: Any, inputs: dict[str, Tensor], length: int) -> int:
    """Return the bytes that autograd saves, each memory once, without parameters and attention weights."""
    kept: dict[int, Tensor] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        # Weights are [H, length, length]; hidden states of a model as wide are [1, length, length].
        weights = tensor.shape[-2:] == (length, length) and tensor.numel() > length**2
        if not weights and tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model.train()(**inputs)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _cache(model: Transformer, inputs: dict[str, Tensor], length: int) -> int | None:
    """Return the bytes of the layers' states after `length` tokens, without spare capacity."""
    if model.decoder is None or not model.decoder.mechanism.supports_kv_cache:
        return None
    ids = inputs["input_ids"]
    with torch.no_grad():
        if model.encoder is None:
            state = model.eval()(ids, state=model.new_state(length)).state
        else:
            state = model.eval()(decoder_input_ids=ids, state=model.encode(ids, reserve=length)).state
    assert state is not None
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    for layer in state.layers:
        layer.map(note)
    return sum(sizes)


LEFT_OUT = (nn.Dropout, nn.Identity)


def tree(model: nn.Module) -> str:
    """Return a line per part: its place, class and parameters (tied parameters at their owner)."""
    lines = list(_lines("", model, 0))
    width = max(len(text) for text, _ in lines)
    return "\n".join(f"{text:<{width}}  {number:>14,}" if number else text for text, number in lines)


def parameters(module: nn.Module) -> int:
    """Return the number of entries in parameters and quantized weights, tied ones once."""
    rounded = sum(
        part.outputs * part.inputs for part in module.modules() if isinstance(part, QuantizedWeight)
    )
    return rounded + sum(parameter.numel() for parameter in module.parameters())


def _lines(name: str, module: nn.Module, depth: int, times: int = 1) -> Iterator[tuple[str, int]]:
    many = f"{times} x " if times > 1 else ""
    yield (
        f"{'  ' * depth}{name + ' ' if name else ''}{many}{type(module).__name__}",
        parameters(module) * times,
    )
    for child, part, count in _children(module):
        yield from _lines(child, part, depth + 1, count)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the children to show; a run of equal members of a list is a single child."""
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList):
            if not isinstance(child, LEFT_OUT):
                yield name, child, 1
            continue
        members = list(child)
        start = 0
        for stop in range(1, len(members) + 1):
            if stop == len(members) or repr(members[stop]) != repr(members[start]):
                yield name, members[start], stop - start
                start = stop
