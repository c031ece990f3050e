"""The linear layer with a 4-bit weight."""

from collections.abc import Sequence

from torch import Tensor

from polyformer.core.ops.int4 import StackedBlocks, dequantized, quantized
from polyformer.core.ops.quantized_layers import QuantizedLinear


class Int4Linear(QuantizedLinear):
    """A `Linear` with a 4-bit weight: blocks `weight` [O, 20 G]; see `polyformer.core.ops.int4`."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__(weight, bias)
        self.register_buffer("weight", quantized(weight))

    def dequantized(self) -> Tensor:
        """Return the weight [O, I] in float32."""
        return dequantized(self.weight, self.inputs)

    def stacked(self, layers: "Sequence[Int4Linear]", biases: Sequence[Tensor | None]) -> StackedBlocks:
        """Return layers in the format of torch's kernel."""
        return StackedBlocks([layer.weight for layer in layers], biases, self.inputs)
