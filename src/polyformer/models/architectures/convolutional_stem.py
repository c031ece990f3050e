"""Patches by convolutions: a short convolutional network instead of one matrix per patch.

    h_0 = pixels;    h_i = relu(norm(conv(h_{i - 1})));    x = h_n W^T + b

The first convolution keeps the size, the log2 P others halve it: every patch of P x P pixels becomes a
token, and tokens see over the edges of their patches. Windows have 3 x 3 pixels. The first two convolutions
have a quarter and a half of the channels, the others all E (for P = 2 a half and all).

Xiao et al. 2021 (Early convolutions help Transformers see better), section 3. Different from the paper: norms
over channels and pixels of one image instead of batch normalization, so that images of a
batch do not affect each other, and the first convolution.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.core.ops.linear import Linear


class Convolution(nn.Module):
    """relu(norm(conv(h))) with 3 x 3 pixels; the matrix has the form of a linear layer [O, 9 C]."""

    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.stride, self.channels = stride, channels
        self.matrix = Linear(9 * channels, width, bias=False)
        self.norm = nn.GroupNorm(1, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, O, H / stride, W / stride] for x [B, C, H, W]."""
        weight = self.matrix.weight.unflatten(1, (self.channels, 3, 3))
        return F.relu(self.norm(F.conv2d(x, weight, stride=self.stride, padding=1)))


class ConvolutionalStem(nn.Module):
    """Tokens of images by convolutions; see the module."""

    def __init__(self, channels: int, width: int, patch: tuple[int, int]):
        super().__init__()
        halvings = patch[0].bit_length() - 1
        if patch != (2**halvings, 2**halvings) or halvings == 0:
            raise InputError(
                f"convolutional_stem: expected square patches of 2, 4, 8 or 16 pixels, got {patch[0]} x "
                f"{patch[1]}; change patch_size, or set convolutional_stem to false"
            )
        most = min(halvings, 2)
        if width % 2**most:
            raise InputError(
                f"convolutional_stem: expected a hidden_size that {2**most} divides, got {width}; change "
                "hidden_size, or set convolutional_stem to false"
            )
        widths = [channels, *(width >> max(0, most - i) for i in range(halvings + 1))]
        self.patch = patch
        self.layers = nn.ModuleList(
            Convolution(widths[i], widths[i + 1], 2 if i else 1) for i in range(halvings + 1)
        )
        self.output = Linear(width, width)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return tokens [B, n, E] of images [B, C, H, W], in raster order as `patches` does."""
        height, width = (size // side * side for size, side in zip(pixels.shape[2:], self.patch))
        x = pixels[:, :, :height, :width].to(self.output.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.output(x.flatten(2).mT)
