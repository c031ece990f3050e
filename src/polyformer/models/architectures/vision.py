"""Vision Transformer: an encoder that reads an image as a sequence of patches and classifies it.

x = [class; (distillation; registers;) patch_1 W^T + b; ...; patch_n W^T + b] + positions
    logits = head(encoder(x))        patch_i: the C x P x P numbers of a square, row by row of the image

Dosovitskiy et al. 2021 (ViT), equations 1 to 4; Touvron et al. 2021 (DeiT), section 4. Cost: the encoder on 1
+ n tokens, and 2 n C P P E for the patches. Patches do not overlap. Pixels on the right and at the bottom
that do not fill a patch are ignored, as in a convolution.

A convolutional stem: a short convolutional network instead of one matrix per patch.

    h_0 = pixels;    h_i = relu(norm(conv(h_{i - 1})));    x = h_n W^T + b

The first convolution keeps the size, the log2 P others halve it: every patch of P x P pixels becomes a
token, and tokens see over the edges of their patches. Windows have 3 x 3 pixels. The first two convolutions
have a quarter and a half of the channels, the others all E (for P = 2 a half and all).

Xiao et al. 2021 (Early convolutions help Transformers see better), section 3. Different from the paper: norms
over channels and pixels of one image instead of batch normalization, so that images of a
batch do not affect each other, and the first convolution.
"""

import contextlib
import dataclasses
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.positions import LearnedConfig
from polyformer.attention.positions.added import Learned
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.layers import Dropout, collect_auxiliary_losses
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.core.ops.softmax import recorded
from polyformer.core.ranges import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    UnitFloat,
    check_sizes,
)
from polyformer.core.sequence.context import Context, Image
from polyformer.models.architectures.pretrained import PretrainedMixin
from polyformer.models.config import OriginConfig
from polyformer.models.initialization import initialize
from polyformer.models.outputs import ModelOutput
from polyformer.models.plugins import ConfigWithImports
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import ClassifyConfig, HeadConfig, HeadInput, HeadShape
from polyformer.nn.stack import AttentionConfig, StackConfig, build_stack


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


def _encoder() -> StackConfig:
    return StackConfig(
        num_hidden_layers=12,
        attention=AttentionConfig(num_attention_heads=12),
        feedforward=DenseConfig(intermediate_size=3072, activation="gelu"),
        position=LearnedConfig(),
        block=PreNormConfig(),
        norm=LayerNormConfig(eps=1e-12),
        dropout=0.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig(ConfigWithImports):
    """The configuration of a Vision Transformer; by default ViT-Base/16 for images of 224 x 224.

    `image_size`, `patch_size`: (height, width). `dropout`: of the patches' vectors with their positions.
    `head`: a head with pooling: "first" takes the class token, "mean" the patches, and heads of images take
    both. `mean`, `std`: of the training images' pixels, scaled to 0 to 1, a number for each channel or one
    for all.
    """

    image_size: tuple[PositiveInt, PositiveInt] = (224, 224)
    patch_size: tuple[PositiveInt, PositiveInt] = (16, 16)
    num_channels: PositiveInt = 3
    hidden_size: PositiveInt = 768
    class_token: bool = True
    distillation_token: bool = False  # a second one, as in DeiT
    registers: NonNegativeInt = 0  # learned tokens that no head reads (Darcet et al. 2024)
    convolutional_stem: bool = False  # patches by convolutions
    patch_bias: bool = True  # of the matrix of patches
    normed: bool = False  # a norm before the first layer, as in CLIP
    dropout: Probability = 0.0
    encoder: StackConfig = dataclasses.field(default_factory=_encoder)
    head: HeadConfig = ClassifyConfig(num_labels=1000, hidden=False, dropout=0.0)
    mean: tuple[float, ...] = (0.5,)
    std: tuple[PositiveFloat, ...] = (0.5,)
    initializer_range: UnitFloat | None = 0.02
    origin: OriginConfig | None = dataclasses.field(default=None, compare=False)

    paper: ClassVar[str] = "Dosovitskiy et al. 2021 (ViT), section 3.1"
    weights: ClassVar[None] = None  # never int8, see `weights.py`

    def __post_init__(self) -> None:
        check_sizes(self)
        if not self.std:
            raise InputError("std: expected 1 number or more, got none")

    def check(self) -> None:
        """Raise `InputError` for options that do not fit together.

        Overrides set single options, so options are compared when a model is built.
        """
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        if height < patch_height or width < patch_width:
            raise InputError(
                f"image_size: {height} x {width} pixels are less than a patch of {patch_height} x "
                f"{patch_width}; use a smaller patch_size or larger images"
            )
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.num_channels):
                raise InputError(
                    f"{name}: expected 1 number, or one for each of the {self.num_channels} channels, "
                    f"got {quote(list(getattr(self, name)))}"
                )
        if self.distillation_token and not self.class_token:
            raise InputError("distillation_token: it follows a class token; set class_token to true")
        self._check_head()

    def _check_head(self) -> None:
        pooling, kind = getattr(self.head, "pooling", None), quote(self.head.kind)
        if pooling is None:
            raise InputError(f"head: expected one that pools, such as 'classify', got {kind}")
        if pooling == "first" and not self.class_token:
            raise InputError("head.pooling: 'first' reads the class token, and there is none; use 'mean'")
        if pooling == "all" and not self.class_token:
            raise InputError(f"head: {kind} reads a class token; set class_token to true, or use 'classify'")
        if self.head.kind == "distilled" and not self.distillation_token:
            raise InputError(f"head: {kind} reads a distillation token; set distillation_token to true")

    @property
    def tokens(self) -> int:
        """Return the number of tokens before the patches."""
        return self.class_token + self.distillation_token + self.registers

    def image(self, height: int, width: int) -> Image:
        """Return the tokens of an image of `height` x `width` pixels."""
        return Image(self.tokens, height // self.patch_size[0], width // self.patch_size[1])

    def head_shape(self) -> HeadShape:
        """Return the sizes with which the head is built; there is no vocabulary."""
        return HeadShape(hidden_size=self.encoder.block.width(self.hidden_size), vocab_size=1)

    @classmethod
    def examples(cls) -> tuple["VisionConfig", ...]:
        config = cls(image_size=(12, 8), patch_size=(4, 4), num_channels=1, hidden_size=16)
        sizes: dict[str, Any] = {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "num_labels": 5,
        }
        for name, value in sizes.items():
            config = config.override(name, value)
        return (config,)


class VisionTransformer(PretrainedMixin):
    """A Vision Transformer; see `forward`."""

    config_type = VisionConfig
    config: VisionConfig

    def __init__(self, config: VisionConfig):
        super().__init__(config)
        config.check()
        width, (height, across) = config.hidden_size, config.patch_size
        image = config.image(*config.image_size)
        self.patches: Linear | ConvolutionalStem = (
            ConvolutionalStem(config.num_channels, width, config.patch_size)
            if config.convolutional_stem
            else Linear(config.num_channels * height * across, width, bias=config.patch_bias)
        )
        self.class_token = nn.Embedding(1, width) if config.class_token else None
        self.distillation_token = nn.Embedding(1, width) if config.distillation_token else None
        self.registers = nn.Embedding(config.registers, width) if config.registers else None
        self.norm = config.encoder.norm.build(width) if config.normed else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.encoder = build_stack(config.encoder, width, image.length, image=image)
        self.head = config.head.build(config.head_shape())
        initialize(self, config.initializer_range)

    @property
    def grid(self) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches."""
        _, rows, columns = self.config.image(*self.config.image_size)
        return rows, columns

    def normalize(self, images: Tensor) -> Tensor:
        """Return (images / 255 - mean) / std as [B, C, H, W] float32 for images [B, H, W, C] of bytes."""
        channels = self.config.num_channels
        if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[-1] != channels:
            raise InputError(
                f"images: expected uint8 [batch, height, width, {channels}], "
                f"got {images.dtype} {list(images.shape)}"
            )
        # Shapes [C], or [1] for all channels.
        mean, std = (
            images.new_tensor(numbers, dtype=torch.float32) for numbers in (self.config.mean, self.config.std)
        )
        return ((images / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> ModelOutput:
        """Read images and return the predictions of the head.

        Args:
            pixel_values: [B, C, H, W], normalized (`normalize`).
            labels: the labels of the head; for `classify` classes [B].
            interpolate_pos_encoding: allow images of another size than the model's; learned positions of the
                patches are interpolated (bicubic).
            output_attentions, output_hidden_states: also return them.

        Raises `InputError` for images with another number of channels, another size or integers.
        """
        image = self._image_tokens(pixel_values, interpolate_pos_encoding)
        x = self._patches(pixel_values)
        # Equation 1: the class token comes first.
        before = [self.class_token, self.distillation_token, self.registers]
        tokens = [token.weight.expand(len(x), -1, -1).to(x.dtype) for token in before if token is not None]
        x = torch.cat([*tokens, x], 1)
        pos = torch.arange(image.length, device=x.device)
        x = self.dropout(self.norm(self._add_positions(x, pos, image)))
        # Patterns and positions in two dimensions read the grid.
        context = Context(image.length, image.length, image=image)
        collect: list[Tensor] | None = [] if output_hidden_states else None
        recording = recorded() if output_attentions else contextlib.nullcontext([])
        with recording as attentions, collect_auxiliary_losses() as auxiliary:
            hidden, _ = self.encoder.run(x, pos, context, collect=collect)
        read = self._read_by_head(hidden, image)
        loss, predictions = self.head(HeadInput(read, None, hidden.new_empty(0, 0)), labels)
        losses = None
        if loss is not None:
            losses = {
                "prediction": loss.detach(),
                **{name: term.detach() for name, term in auxiliary.items()},
            }
            loss = loss + sum(auxiliary.values()) if self.training else loss
        return ModelOutput(
            loss,
            hidden,
            predictions,
            None if collect is None else tuple(collect),
            tuple(attentions) if output_attentions else None,
            losses=losses,
        )

    def _read_by_head(self, hidden: Tensor, image: Image) -> Tensor:
        """Return the tokens that the head reads: all, the patches, or the class token and the patches."""
        pooling = getattr(self.config.head, "pooling", "")
        if pooling == "first":
            return hidden
        # Mean pooling averages the patches without the tokens before them.
        patches = hidden[:, image.first :]
        return torch.cat([hidden[:, :1], patches], 1) if pooling == "all" else patches

    def _patches(self, pixels: Tensor) -> Tensor:
        """Return the tokens [B, n, E] of the patches of images."""
        if isinstance(self.patches, ConvolutionalStem):
            return self.patches(pixels)
        return self.patches(patches(pixels.to(self.patches.weight.dtype), self.config.patch_size))

    def _image_tokens(self, pixels: Tensor, interpolate: bool) -> Image:
        """Return the tokens of the images; raises `InputError` for images that the model does not take."""
        config = self.config
        if not pixels.is_floating_point():
            raise InputError(
                f"pixel_values: expected normalized floating-point numbers, got {pixels.dtype}; "
                "`normalize` makes them of bytes"
            )
        if pixels.dim() != 4 or pixels.shape[1] != config.num_channels:
            raise InputError(
                f"pixel_values: expected [batch, {config.num_channels}, height, width] "
                f"({config.num_channels} channels), got {list(pixels.shape)}"
            )
        height, width = pixels.shape[2:]
        own = " x ".join(map(str, config.image_size))
        if (height, width) == config.image_size:
            return config.image(height, width)
        if not interpolate:
            raise InputError(
                f"pixel_values: this model takes images of {own} pixels, got {height} x {width}; resize "
                "them, or set interpolate_pos_encoding=True"
            )
        image = config.image(height, width)
        if not image.height or not image.width:
            raise InputError(f"pixel_values: {height} x {width} pixels are less than a patch")
        return image

    def _add_positions(self, x: Tensor, pos: Tensor, image: Image) -> Tensor:
        """Return x [B, T, E] with the positions of its tokens, interpolated for another size of images."""
        position = self.encoder.position
        if image[1:] == self.grid or position.max_positions is None:
            return position.embed(x, pos, 0)
        if not isinstance(position, Learned) or len(position.tables) > 1:
            raise InputError(
                f"interpolate_pos_encoding: positions {quote(self.config.encoder.position.kind)} cannot be "
                f"interpolated; resize the images to {' x '.join(map(str, self.config.image_size))} pixels"
            )
        rows = position.get_parameter("tables.0.weight")[position.offset :]
        # Interpolation takes images [1, E, rows, columns]; class tokens keep their positions.
        of_patches = rows[image.first :].T.reshape(1, -1, *self.grid)
        new = F.interpolate(of_patches, size=image[1:], mode="bicubic", align_corners=False)
        return x + torch.cat([rows[: image.first], new.flatten(2)[0].T]).to(x.dtype)


def patches(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the patches of images [B, C, H, W] in raster order: [B, n, C P_h P_w]."""
    batch, channels, height, width = pixels.shape
    rows, columns = height // size[0], width // size[1]
    whole = pixels[:, :, : rows * size[0], : columns * size[1]]
    # [B, C, rows, P_h, columns, P_w] to [B, rows, columns, C, P_h, P_w]: a patch is then contiguous.
    squares = whole.reshape(batch, channels, rows, size[0], columns, size[1]).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(batch, rows * columns, -1)
