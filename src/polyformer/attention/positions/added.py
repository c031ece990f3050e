"""Positions that are added to the input: a token's vector x_p gets a vector of its position p.

    none                x_p
    learned             x_p + table[p + offset]
    learned_per_layer   x_p + table_t[p], in every layer t
    sinusoidal          x_p + PE(p + offset)
                        PE(p, 2i) = sin(p / base^(2i/E)),  PE(p, 2i+1) = cos of the same
    step_sinusoid       x_p + PE(p) + PE(t), in every layer t
    axial               x_p + concat(W_1[r_1], W_2[r_2], ..)
                        p = (r_1 n_2 + r_2) n_3 + ..,  W_i: [n_i, d_i]
    grid                x_p + rows[p // (W C)] + columns[p // C % W] (+ channels[p % C])
    concatenated        W [x_p ; s_p] = W_x x_p + W_s s_p
                        W = [W_x W_s]: [E, d + width],  x_p: [d],  s_p: [width]

All but `learned_per_layer` and `step_sinusoid` change the input of the first layer only.
"""

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt
from torch import Tensor, nn

from polyformer.attention.positions.base import (
    Position,
    PositionConfig,
    Shape,
    SinkCache,
    check_positions,
    readable_length,
    sinusoids,
)
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.linear import Linear
from polyformer.core.ranges import NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPositionConfig(PositionConfig):
    """No positions: the model gets no vectors or biases for positions.

    They are sufficient for a causal decoder, and a baseline for every scheme.
    """

    kind: ClassVar[str] = "none"

    def build(self, shape: Shape) -> "NoPosition":
        return NoPosition()


class NoPosition(Position):
    """The module without effect."""

    counts_in_cache = True

    def count_in_cache(self, cache: SinkCache) -> None:
        """Do nothing: no distance matters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedConfig(PositionConfig):
    """Learned positions: a table of vectors is added to the input of the first layer.

    The table has max_positions x E parameters; a position beyond it is an error. The first `offset` rows,
    which RoBERTa and BART have, belong to no position. `length`: the number of positions, if it differs from
    the model's, as in LED's decoder.
    """

    offset: NonNegativeInt = 0
    length: PositiveInt | None = None

    kind: ClassVar[str] = "learned"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Vaswani et al. 2017, table 3, row E"

    def build(self, shape: Shape) -> "Learned":
        return Learned([shape.input_size], self.length or shape.max_positions, self.offset)

    @classmethod
    def examples(cls) -> tuple["LearnedConfig", ...]:
        return cls(), cls(offset=2), cls(length=60)

    def with_max_positions(self, before: int, after: int) -> "LearnedConfig":
        """Return the configuration with a table of the model's length, if it had one of its own."""
        return dataclasses.replace(self, length=None) if self.length is not None else self


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedPerLayerConfig(PositionConfig):
    """Learned positions per layer: a table of vectors is added to the input of every layer."""

    kind: ClassVar[str] = "learned_per_layer"
    paper: ClassVar[str] = "Al-Rfou et al. 2018, section 3.3"

    def build(self, shape: Shape) -> "Learned":
        # The first layer adds to the embedding sum, which may be narrower than the stack.
        widths = [shape.input_size] + [shape.hidden_size] * (shape.num_layers - 1)
        return Learned(widths, shape.max_positions)


class Learned(Position):
    """A table [offset + max_positions, E] for each of `widths`; the input of further layers is unchanged."""

    def __init__(self, widths: list[int], max_positions: int, offset: int = 0):
        super().__init__()
        if max_positions < 1:
            raise InputError(
                f"max_position_embeddings: learned positions need 1 or more, got {max_positions}"
            )
        self.tables = nn.ModuleList(nn.Embedding(offset + max_positions, width) for width in widths)
        self.max_positions, self.offset = max_positions, offset
        self.embeds_layers = len(widths) > 1

    def position_tables(self) -> dict[str, int]:
        """Return all tables; the first `offset` rows of each table belong to no position."""
        return {f"tables.{i}.weight": self.offset for i in range(len(self.tables))}

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + table[p + offset] with the table of the layer."""
        table = self.tables._modules.get(str(layer))  # faster than an index
        if table is None:
            return x
        try:
            # Positions [T] or [B, T] give vectors [T, E] or [B, T, E], which broadcast to x.
            return x + table(pos + self.offset if self.offset else pos)
        except IndexError:
            if self.max_positions is not None:
                check_positions(pos, self.max_positions)
            raise


Layout = Literal["pairs", "halves"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinusoidalConfig(PositionConfig):
    """Sinusoidal positions: sines and cosines of the position are added to the input.

    `layout` sets the order of the channels: sines and cosines in turn ("pairs": the paper), or all sines and
    then all cosines ("halves": CTRL). With `inclusive`, as in tensor2tensor and therefore in fairseq and
    M2M-100, the last of the factors is `base` itself: base^(i / (E/2 - 1)). If E is then odd, the last
    channel is zero. Positions count from `offset`. There are no parameters, and the length is not limited;
    PE(p + k) is a fixed linear map of PE(p).

    PE(p) has length sqrt(E / 2). A model that adds it therefore multiplies the token vectors, initially of
    length 1, by sqrt(E) (section 3.4), unless `embedding.scaled` is set.
    """

    layout: Layout = "pairs"
    base: Annotated[float, Gt(1)] = 10000.0
    inclusive: bool = False  # the longest wave is 2 pi base, not just short of it
    offset: NonNegativeInt = 0

    kind: ClassVar[str] = "sinusoidal"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.5"

    def build(self, shape: Shape) -> "Sinusoidal":
        return Sinusoidal(shape.input_size, self)

    @classmethod
    def examples(cls) -> tuple["SinusoidalConfig", ...]:
        return cls(), cls(layout="halves", base=500.0, inclusive=True, offset=2)


class Sinusoidal(Position):
    """The module that adds the sinusoids to the input of the first layer."""

    embeds_layers = False

    adds_sinusoids = True

    def __init__(self, hidden_size: int, config: SinusoidalConfig):
        super().__init__()
        self.hidden_size, self.config = hidden_size, config

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + PE(p + offset) at the first layer, and x at all others."""
        if layer:
            return x
        return x + self._waves(pos + self.config.offset if self.config.offset else pos).to(x.dtype)

    def _waves(self, pos: Tensor) -> Tensor:
        """Return PE [..., E] of positions that already include `offset`."""
        width, base = self.hidden_size, self.config.base
        if self.config.inclusive:
            width -= width % 2
            # The exponent 2i / width of the last pair becomes 1: its factor is the original base.
            base **= width / max(width - 2, 1)
        waves = sinusoids(pos, width, base)
        if self.config.layout == "halves":
            waves = torch.cat([waves[..., ::2], waves[..., 1::2]], -1)
        return F.pad(waves, (0, self.hidden_size - width)) if width < self.hidden_size else waves


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSinusoidConfig(PositionConfig):
    """Step sinusoids: sinusoids of position and step are added to the input of every layer.

    The step is the index of the layer (the circled plus in some texts is this sum). There are no parameters,
    and the length and the number of steps are not limited. Positions and steps count from 0, in the paper
    from 1. Token vectors are multiplied by sqrt(E), as with `sinusoidal`.
    """

    base: Annotated[float, Gt(1)] = 10000.0

    kind: ClassVar[str] = "step_sinusoid"
    paper: ClassVar[str] = "Dehghani et al. 2019 (Universal Transformer), section 2.1"

    def build(self, shape: Shape) -> "StepSinusoid":
        return StepSinusoid(shape.hidden_size, self)


class StepSinusoid(Position):
    """The module that adds the sinusoids to the input of every layer."""

    adds_sinusoids = True

    def __init__(self, hidden_size: int, config: StepSinusoidConfig):
        super().__init__()
        self.hidden_size, self.base = hidden_size, config.base

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + PE(p) + PE(layer) at every layer."""
        # PE(layer) is [E] and broadcasts over positions.
        step = sinusoids(torch.full((), layer, device=pos.device), self.hidden_size, self.base)
        return x + (sinusoids(pos, self.hidden_size, self.base) + step).to(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AxialConfig(PositionConfig):
    """Axial positions: the vectors of the axes of a grid are concatenated and added to the input.

    A text of up to n_1 n_2 .. tokens costs n_1 d_1 + n_2 d_2 + .. parameters instead of n_1 n_2 .. E. A
    position beyond the grid is an error. In training, transformers applies dropout to whole rows of the grid;
    here dropout applies only to the embedding sum.

    `grid`: the lengths n_i of the axes. `widths`: d_i; by default a quarter of E for each axis except the
    last, which has the remaining channels.
    """

    grid: tuple[PositiveInt, ...] = (64, 64)
    widths: tuple[PositiveInt, ...] | None = None

    kind: ClassVar[str] = "axial"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Kitaev et al. 2020 (Reformer), appendix D"

    def __post_init__(self) -> None:
        if len(self.grid) < 2:
            raise InputError(f"grid: expected the lengths of 2 axes or more, got {self.grid}")
        if self.widths is not None and len(self.widths) != len(self.grid):
            raise InputError(f"widths: expected one for each of the {len(self.grid)} axes, got {self.widths}")

    @classmethod
    def examples(cls) -> tuple["AxialConfig", ...]:
        return cls(grid=(8, 5)), cls(grid=(3, 4, 5))

    def with_max_positions(self, before: int, after: int) -> "AxialConfig":
        """Return a grid with a longer first axis: the coordinates of earlier positions do not change."""
        row = math.prod(self.grid[1:])
        return dataclasses.replace(self, grid=(max(self.grid[0], -(-after // row)), *self.grid[1:]))

    def build(self, shape: Shape) -> "Axial":
        return Axial(self, shape.input_size)


class Axial(Position):
    """A table [n_i, d_i] for each axis."""

    embeds_layers = False

    def __init__(self, config: AxialConfig, width: int):
        super().__init__()
        self.grid = config.grid
        quarters = (width // 4,) * (len(config.grid) - 1)
        widths = config.widths or (*quarters, width - sum(quarters))
        if sum(widths) != width or min(widths) < 1:
            raise InputError(f"widths: expected numbers that add up to hidden_size {width}, got {widths}")
        self.tables = nn.ModuleList(nn.Embedding(n, d) for n, d in zip(config.grid, widths, strict=True))
        self.max_positions = math.prod(config.grid)

    def position_tables(self) -> dict[str, int]:
        """Return the table of the first axis: only this axis grows with the number of positions."""
        return {"tables.0.weight": 0}

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + concat(W_1[r_1], W_2[r_2], ..) at the first layer, and x at all others."""
        if layer:
            return x
        check_positions(pos, math.prod(self.grid))
        # The last axis varies fastest, so its coordinate is the remainder of the first division.
        vectors: list[Tensor] = []
        for length, table in zip(reversed(self.grid), reversed(self.tables)):
            vectors.append(table(pos % length))
            pos = pos // length
        return x + torch.cat(vectors[::-1], -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridConfig(PositionConfig):
    """Grid positions: learned vectors for the row and column of a pixel are added to the input.

    The places p are those of an image of H x W pixels of C colours in raster order. There are (H + 1 + W + C)
    x E parameters: the place after the last pixel, which a decoder with a start token reaches, has an extra
    row. In a Vision Transformer pixels are patches, and the tokens before them, such as a class token, get no
    vector. Deviation: the paper uses half of the width for the row and the other half for column and colour.
    Here each vector has the full width, and the layers above can learn to separate them.

    `shape`: (height, width) or (height, width, channels) of the image.
    """

    shape: tuple[PositiveInt, ...]

    kind: ClassVar[str] = "grid"
    adds_vector: ClassVar[bool] = True
    paper: ClassVar[str] = "Parmar et al. 2018 (Image Transformer), section 3.1"

    def __post_init__(self) -> None:
        if len(self.shape) not in (2, 3):
            raise InputError(f"grid: shape: expected 2 or 3 numbers, got {list(self.shape)}")

    def build(self, shape: Shape) -> "Grid":
        if shape.image is not None and self.shape != shape.image[1:]:
            _, height, width = shape.image
            raise InputError(
                f"position.shape: expected {[height, width]}, the rows and columns of patches, "
                f"got {list(self.shape)}"
            )
        return Grid(shape.hidden_size, self.shape, 0 if shape.image is None else shape.image.first)

    @classmethod
    def examples(cls) -> tuple["GridConfig", ...]:
        return cls(shape=(40, 3)), cls(shape=(14, 3, 3))


class Grid(Position):
    """Tables [H + 1, E], [W, E] and, with colours, [C, E]; the first `first` tokens get no vector."""

    embeds_layers = False

    def __init__(self, hidden_size: int, shape: tuple[int, ...], first: int = 0):
        super().__init__()
        self.first = first
        # An extra row: with a start token, a decoder reaches the place after the last pixel.
        height, *others = shape
        self.sizes = (height + 1, *others)
        self.places = math.prod(shape)
        self.max_positions = first + self.places + 1
        self.tables = nn.ModuleList(nn.Embedding(size, hidden_size) for size in self.sizes)

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return x_p + rows[..] + columns[..] + channels[..] at the first layer, and x at all others."""
        if layer:
            return x
        place = pos - self.first
        length = readable_length(place)
        if length > self.places + 1:
            shape = "x".join(str(size) for size in (self.sizes[0] - 1, *self.sizes[1:]))
            raise InputError(
                f"input of {length} tokens: a grid of {shape} has {self.places} places and one for a start "
                "token; set position.shape to the shape of your images"
            )
        rest = place.clamp_min(0) if self.first else place
        before = x
        # The last axis varies fastest; after it, the quotient is the index of the axis before.
        for table, size in list(zip(self.tables, self.sizes))[:0:-1]:
            x = x + table(rest % size)
            rest = rest // size
        x = x + self.tables[0](rest)
        return torch.where((place < 0).unsqueeze(-1), before, x) if self.first else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConcatenatedConfig(PositionConfig):
    """Concatenated positions: position vectors are concatenated to token vectors, not added to them.

    s_p is the vector of any scheme that adds a vector for each position. If `embedding.size` is d = E -
    width, there is no W: y_p = [x_p ; s_p], and the matrices of the first layer take its role. A linear map
    of a concatenation is a sum of two maps: adding s_p (width = d = E) is the case W_x = W_s = I. Unlike
    addition, concatenation leaves channels that no position enters. W costs E (d + width) parameters. The
    number of positions is the limit of `vectors`.

    `width`: the channels of the position vectors. `vectors`: the scheme that computes them, by default
    sinusoids.
    """

    width: PositiveInt = 32
    vectors: PositionConfig = dataclasses.field(
        default_factory=lambda: PositionConfig.from_dict("sinusoidal", "vectors")
    )

    kind: ClassVar[str] = "concatenated"

    def __post_init__(self) -> None:
        if not self.vectors.adds_vector:
            able = sorted(
                kind
                for kind, member in PositionConfig.kinds.items()
                if issubclass(member, PositionConfig) and member.adds_vector
            )
            raise InputError(
                f"vectors: expected a scheme that adds a vector for each position, {', '.join(able)}; "
                f"got {quote(self.vectors.kind)}"
            )

    @classmethod
    def examples(cls) -> tuple["ConcatenatedConfig", ...]:
        learned = PositionConfig.from_dict({"kind": "learned", "offset": 2}, "vectors")
        return cls(width=6), cls(width=5, vectors=learned)

    def with_max_positions(self, before: int, after: int) -> "ConcatenatedConfig":
        """Return the configuration with `vectors` for `after` positions."""
        return dataclasses.replace(self, vectors=self.vectors.with_max_positions(before, after))

    def build(self, shape: Shape) -> "Concatenated":
        return Concatenated(self, shape)


class Concatenated(Position):
    """The module of the position vectors, and the matrix W if the widths require it."""

    embeds_layers = False

    projects_input = True

    def __init__(self, config: ConcatenatedConfig, shape: Shape):
        super().__init__()
        self.width = config.width
        self.vectors = config.vectors.build(
            # The inner scheme is built for a stack as wide as its vectors.
            dataclasses.replace(shape, hidden_size=config.width, embedding_size=None)
        )
        self.max_positions = self.vectors.max_positions
        self.offset = getattr(self.vectors, "offset", 0)
        size = shape.input_size + config.width
        self.projection = (
            nn.Identity() if size == shape.hidden_size else Linear(size, shape.hidden_size, bias=False)
        )

    def embed(self, x: Tensor, pos: Tensor, layer: int) -> Tensor:
        """Return W [x_p ; s_p] of x [B, T, d] at the first layer, and x at all others."""
        if layer:
            return x
        # The scheme adds its vectors to an input; added to zeros they remain unchanged.
        vectors = self.vectors.embed(x.new_zeros(*pos.shape, self.width), pos, 0)
        return self.projection(torch.cat([x, vectors.to(x.dtype).expand(*x.shape[:-1], -1)], -1))
