"""Memory-compressed attention against torch's own strided convolution, and what each query sees."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.mechanisms import MemoryCompressedConfig
from polyformer.attention.mechanisms.memory_compressed import (
    CompressedState,
    MemoryCompressed,
)
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.presets import create_model


def made(heads: int = 2, width: int = 4, **options: Any) -> MemoryCompressed:
    torch.manual_seed(0)
    return MemoryCompressedConfig(**options).build(heads, width).double().eval()


def tensors(length: int, heads: int = 2, width: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, heads, length, width, dtype=torch.float64) for _ in range(3)]


def convolved(x: Tensor, kernel: Tensor, stride: int) -> Tensor:
    """torch's convolution in as many groups as heads: [B, H, T, D] to [B, H, S, D]."""
    heads, taps, width, _ = kernel.shape
    weight = kernel.permute(0, 3, 2, 1).reshape(heads * width, width, taps)
    y = F.conv1d(x.transpose(2, 3).flatten(1, 2), weight, stride=stride, groups=heads)
    return y.unflatten(1, (heads, width)).transpose(2, 3)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 3), (4, 2), (2, 3), (1, 1)])
@pytest.mark.parametrize("length", [2, 9, 13])
def test_it_is_attention_to_a_strided_convolution(kernel: int, stride: int, length: int):
    module, (q, k, v) = made(kernel=kernel, stride=stride), tensors(length)
    y, _ = module(q, k, v, Context(length, length, causal=True), None, None)
    keys, values = k[:, :, :1], v[:, :, :1]
    ends = [0]
    if length >= kernel:
        keys = torch.cat([keys, convolved(k, module.key_kernel, stride)], 2)
        values = torch.cat([values, convolved(v, module.value_kernel, stride)], 2)
        ends += range(kernel - 1, length, stride)
    seen = torch.tensor(ends) <= torch.arange(length).unsqueeze(1)
    expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_an_encoder_sees_windows_that_the_end_cuts_off():
    module, (q, k, v) = made(), tensors(10)
    y, _ = module(q, k, v, Context(10, 10), None, None)
    keys, values = (F.pad(x, (0, 0, 0, 2)) for x in (k, v))
    expected = F.scaled_dot_product_attention(
        q, convolved(keys, module.key_kernel, 3), convolved(values, module.value_kernel, 3)
    )
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)


def test_the_first_tokens_see_the_first_as_it_is():
    module, (q, k, v) = made(), tensors(4)
    y, _ = module(q, k, v, Context(4, 4, causal=True), None, None)
    torch.testing.assert_close(y[:, :, :2], v[:, :, :1].expand(-1, -1, 2, -1))
    assert not torch.allclose(y[:, :, 2], v[:, :, 0])


def test_a_state_is_a_third_of_a_cache():
    """Of 100 tokens 34 slots and two tokens are left, whatever the steps."""
    module, (q, k, v) = made(), tensors(100)
    whole, _ = module(q, k, v, Context(100, 100, causal=True), None, None)
    state, outputs, start = module.new_state(0), [], 0
    for size in (1, 1, 5, 30, 2, 61):
        stop = start + size
        part = (x[:, :, start:stop] for x in (q, k, v))
        y, state = module(*part, Context(size, stop, causal=True), state, None)
        outputs.append(y)
        start = stop
    torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=1e-10, atol=1e-10)
    assert isinstance(state, CompressedState)
    assert state.keys is not None
    assert state.keys.shape[2] == 2
    assert state.ends is not None
    assert int((state.ends[0] < 100).sum()) == 34
    assert state.slots.length <= 34 + 4, "a step that completes no window leaves an empty slot at most"


def test_what_is_wrong_is_named():
    for name in ("kernel", "stride"):
        with pytest.raises(InputError, match=f"{name}: expected 1 or more, got 0"):
            MemoryCompressedConfig(**{name: 0})


def test_the_preset_takes_turns():
    model = create_model("t-dmca-small", hidden_size=16, vocab_size=50)
    assert model.decoder is not None
    kinds = [
        (type(layer.attention.mechanism).__name__, type(layer.feedforward).__name__)
        for layer in model.decoder.layers
    ]  # type: ignore[union-attr]
    local, compressed = ("SoftmaxAttention", "Dense"), ("MemoryCompressed", "Experts")
    assert kinds == [local, compressed, local, compressed, local]
