"""What a model costs at each length, measured on the meta device, where nothing is computed."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from polyformer.model import Transformer


@dataclasses.dataclass(frozen=True)
class Cost:
    """One text of `length` tokens (for an encoder-decoder: a source and a target of that length).

    flops: floating-point operations of one forward pass with the logits of all tokens; a product and its sum
    are two, and what a mask hides counts where it is computed. activations: bytes in float32 kept for the
    backward pass, without attention weights (fused kernels keep none) and logits. cache: bytes in float32 of
    keys and values kept in generation, None for an encoder.
    """

    length: int
    flops: int
    activations: int
    cache: int | None


def cost(model: Transformer, length: int) -> Cost:
    """The cost of `model`, which lies on the meta device."""
    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, length, dtype=torch.long, device="meta")}
    if model.encoder is not None and model.decoder is not None:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        # Not model(...): the counter's hooks would take the output apart, and compute the logits once more.
        _ = model.eval().forward(**inputs).logits
    return Cost(
        length, counter.get_total_flops(), _kept(model, inputs, length), _cache(model, inputs, length)
    )


def _kept(model: Transformer, inputs: dict[str, Tensor], length: int) -> int:
    """Bytes of what autograd keeps, each memory once, parameters and attention weights apart."""
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
    """Bytes of the layers' states after `length` tokens, with room for no more."""
    if model.decoder is None:
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
