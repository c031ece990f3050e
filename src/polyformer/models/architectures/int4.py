"""Products with 4-bit weights in groups of 32 inputs, y = x W^T + b, in the format of GGUF's type Q4_1:

    W_oi = d_og q_oi + m_og,    q in 0 .. 15,    g = i div 32

The numbers of a group are a block of 20 bytes: d and m in float16, then 16 bytes, with q of the first 16
inputs in the low halves and of the last 16 in the high halves. `dequantized` is the definition. Products of a
CPU:

`packed_product`, for a few rows: torch's kernel reads 4 bits of each weight. It is fast only with x, d, m and
y rounded to bfloat16, and 15 times as slow with float32. Sums are float32.

`float_product`, for more rows: float products with a few rows of W each.

A row of x affects no other row.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.linear import stacked_bias
from polyformer.core.ops.quantized import QuantizedLinear, chunked_product

GROUP, BLOCK = 32, 20
"""The inputs of a group, and the bytes of its block."""

LEVELS = 15
"""The largest q; the least is 0."""

STEP = 16
"""torch's kernel takes a multiple of this number of outputs."""

FEW = 32
"""The most rows for torch's kernel; for more rows chunks are as fast."""


def quantized(weight: Tensor) -> Tensor:
    """Return the blocks [O, 20 I/32] (I/32 rounded up) of a weight [O, I], in bytes.

    Raises `InputError` if a number is not finite, or beyond the largest float16.
    """
    exact = weight.detach().float()
    outputs, inputs = exact.shape
    missing = -inputs % GROUP
    groups = torch.cat([exact, exact[:, -1:].expand(-1, missing)], 1).view(outputs, -1, GROUP)
    if not groups.numel():
        return torch.empty(outputs, 0, dtype=torch.uint8, device=weight.device)
    least, largest = groups.amin(2), groups.amax(2)
    numbers = torch.stack([(largest - least) / LEVELS, least], 2).half()
    if not weight.is_meta and not bool(numbers.isfinite().all()):
        raise InputError(
            "weights: contain NaN, infinity or numbers beyond 65504, so they cannot become int4; use float32"
        )
    scale, low = numbers.float().unsqueeze(3).unbind(2)
    steps = ((groups - low) / scale.where(scale > 0, 1)).round().clamp(0, LEVELS).to(torch.uint8)
    first, last = steps.split(GROUP // 2, 2)
    return torch.cat([numbers.view(torch.uint8), first | last << 4], 2).view(outputs, -1)


def unpacked(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [O, G, 32], in bytes, and d and m [O, G], in float32, of blocks [O, 20 G]."""
    parts = blocks.view(len(blocks), -1, BLOCK)
    numbers = parts[..., :4].contiguous().view(torch.float16).float()
    halves = parts[..., 4:]
    return torch.cat([halves & 15, halves >> 4], 2), numbers[..., 0], numbers[..., 1]


def dequantized(blocks: Tensor, inputs: int) -> Tensor:
    """Return the weight [O, I], in float32, of blocks [O, 20 G]."""
    q, d, m = unpacked(blocks)
    return torch.addcmul(m.unsqueeze(2), q.float(), d.unsqueeze(2)).flatten(1)[:, :inputs]


def has_kernel() -> bool:
    """Return whether torch has vectorized code for the product with few rows."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


class StackedBlocks:
    """Weights with the same I inputs, stacked, in the format of torch's kernel.

    Args:
        blocks: [O, 20 G] each. biases: [O] each or None. inputs: I.
    """

    def __init__(self, blocks: Sequence[Tensor], biases: Sequence[Tensor | None], inputs: int):
        self.blocks, self.inputs = blocks, inputs
        self.bias = stacked_bias(biases, [*map(len, blocks)])
        self._packed: tuple[Tensor, Tensor] | None = None

    def product(self, x: Tensor, exact: bool) -> Tensor:
        """Return x [..., I] times the weights, plus the biases: [..., O]. exact: never in bfloat16."""
        if exact or x.numel() > FEW * x.shape[-1] or not has_kernel():
            y = torch.cat([self.float_product(x, part) for part in self.blocks], -1)
        else:
            y = self.packed_product(x)
        return y if self.bias is None else y + self.bias

    def float_product(self, x: Tensor, blocks: Tensor) -> Tensor:
        """Return x [..., I] times the weight of blocks [O, 20 G], by float products: [..., O]."""
        return chunked_product(
            x, len(blocks), lambda rows: dequantized(blocks[rows], self.inputs).to(x.dtype)
        )

    def packed_product(self, x: Tensor) -> Tensor:
        """Return x [..., I] times the weights, by torch's kernel."""
        weight, numbers = self.packed()
        rows = x.reshape(-1, self.inputs).to(torch.bfloat16)
        missing = len(numbers) * GROUP - self.inputs
        rows = F.pad(rows, (0, missing)) if missing else rows
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight, GROUP, numbers)
        return y[:, : sum(map(len, self.blocks))].to(x.dtype).view(*x.shape[:-1], -1)

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the weight in the kernel's format, packed when first needed, and its d and m + 8d."""
        if self._packed is None:
            q, d, m = unpacked(torch.cat(tuple(self.blocks)))
            missing = -len(q) % STEP
            integers = F.pad(q.flatten(1), (0, 0, 0, missing)).int()
            numbers = F.pad(
                torch.stack([d, m + 8 * d], 2), (0, 0, 0, 0, 0, missing)
            )  # the kernel: (q - 8) d + ...
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1)
            self._packed = packed, numbers.transpose(0, 1).bfloat16().contiguous()
        return self._packed


class Int4Linear(QuantizedLinear):
    """A `Linear` with a 4-bit weight: blocks `weight` [O, 20 G]; see the module."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(weight, bias)
        self.register_buffer("weight", quantized(weight))

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        return dequantized(self.weight, self.inputs)

    def stacked(self, layers: "Sequence[Int4Linear]", biases: Sequence[Tensor | None]) -> StackedBlocks:
        """Return layers in the format of torch's kernel."""
        return StackedBlocks([layer.weight for layer in layers], biases, self.inputs)
