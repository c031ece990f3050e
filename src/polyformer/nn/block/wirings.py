"""Blocks: how the sub-layers f of a layer are wired around the residual stream x.

    post         x = norm(x + f(x))
    pre          x = x + f(norm(x))
    parallel     x = x + sum over all f of f(norm(x)), with a shared norm or a norm each
    sandwich     x = x + norm(f(norm(x)))
    reversible   y1 = x1 + F(norm(x2)),  y2 = x2 + G(norm(y1))
                 x2 = y2 - G(norm(y1)),  x1 = y1 - F(norm(x2))

Dropout follows each f. In the first two and in `sandwich` a sub-layer reads the result of the one before it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.ops.layers import Dropout
from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.parts import submodule
from polyformer.core.ranges import PositiveFloat

SubLayer = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(Config):
    """Family of wirings: `build(hidden_size, sublayers, norm, dropout)` creates the module of a layer.

    `normalizes_output`: the output of a layer is already normalised, so the stack adds no final norm.
    `reversible`: the input x consists of two streams, [2, B, T, E].
    """

    option: ClassVar[str] = "model.block"
    normalizes_output: ClassVar[bool] = False
    reversible: ClassVar[bool] = False

    @property
    def exceeds_float16(self) -> bool:
        """Return whether outputs of feed-forwards, and sums of these, are too large for float16."""
        return False

    @property
    def stream_copies(self) -> int:
        """Return the number n of copies of x, [n, B, T, E], that layers pass on and the stack sums; 0 for
        none."""
        return 0

    @property
    def has_features(self) -> bool:
        """Return whether only a `FeatureStack` runs layers with this wiring."""
        return self.reversible or self.exceeds_float16 or self.stream_copies > 0

    @property
    def needs_tokenwise_norm(self) -> bool:
        """Return whether a norm sees some tokens twice or never, and must treat each separately."""
        return self.reversible

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Block":
        """Return the wiring of `sublayers` sub-layers, with the norms that it needs."""
        raise NotImplementedError

    def for_layer(self, layer: int) -> "BlockConfig":
        """Return the configuration of layer `layer` of a stack; by default all layers have the same."""
        return self

    def width(self, hidden_size: int) -> int:
        """Return the width of the output of a stack of such layers."""
        return hidden_size


class Block(nn.Module):
    """A wiring that passes x [B, T, E] through sub-layers, each [B, T, E] -> [B, T, E]."""

    norms: nn.ModuleList = submodule()
    dropout: Dropout = submodule()

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float):
        super().__init__()
        self.norms = nn.ModuleList(norm.build(hidden_size) for _ in range(norms))
        # One dropout module serves all sub-layers, as it has no state.
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Return the output of the layer, with the shape of x.

        valid: [B, T] bool, the tokens that are not padding, for norms over all tokens (`normalize`);
        None if there is no padding or if the norm treats each token separately.
        """
        raise NotImplementedError

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return the input of the first sub-layer for the input x of the layer: norm(x)."""
        return self.norms[0](x)

    def memory_input(self, x: Tensor) -> Tensor:
        """Return the part [B, T, E] of the layer input x that a memory stores for `pre_norm_memory`."""
        return x

    def pre_norm_memory(self, memory: Tensor) -> Tensor:
        """Return the input of the first sub-layer for a stored `memory_input`."""
        return self.pre_norm(memory)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostNormConfig(BlockConfig):
    """Post-norm block: each sub-layer is followed by a residual sum and a norm.

    It requires warm-up (Xiong et al. 2020): the norm of the sum leaves no identity path through the stack.
    """

    kind: ClassVar[str] = "post"
    paper: ClassVar[str] = "Vaswani et al. 2017, section 3.1"
    normalizes_output: ClassVar[bool] = True

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PostNorm":
        return PostNorm(hidden_size, sublayers, norm, dropout)


class PostNorm(Block):
    """The wiring of the original Transformer."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = norm(x + dropout(f(x))) for each f in turn."""
        for norm, sublayer in zip(self.norms, sublayers):
            y = sublayer(x)
            x = normalize(norm, x + (self.dropout(y) if self.training else y), valid)
        return x

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return x: the first sub-layer has no norm before it."""
        return x


FLOAT16_MAX = torch.finfo(torch.float16).max


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreNormConfig(BlockConfig):
    """Pre-norm block: each sub-layer reads a normalised input and is added to the residual stream.

    It trains without warm-up.

    `finite`: for T5, which was trained in bfloat16: its feed-forward outputs exceed the range of float16. A
    model in float16 then keeps them and the residual stream in float32. Not with adaptive depth, a memory,
    quantized weights or other feed-forwards than 'dense' and 'gated': larger values then become the largest
    number of float16. `first_norm`: whether the first sub-layer of the first layer has a norm; ModernBERT
    normalises the embeddings instead. `residual_scale`: a factor of what sub-layers add, as in Granite.
    """

    finite: bool = False
    first_norm: bool = True
    residual_scale: PositiveFloat = 1.0

    kind: ClassVar[str] = "pre"
    paper: ClassVar[str] = "Xiong et al. 2020, section 3"

    @classmethod
    def examples(cls) -> tuple["PreNormConfig", ...]:
        return cls(), cls(finite=True), cls(first_norm=False), cls(residual_scale=0.5)

    @property
    def exceeds_float16(self) -> bool:
        """Return `finite`."""
        return self.finite

    def for_layer(self, layer: int) -> "PreNormConfig":
        """Return the configuration of layer `layer`: only the first layer may lack its first norm."""
        return self if self.first_norm or layer == 0 else dataclasses.replace(self, first_norm=True)

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "PreNorm":
        kind = PreNorm if self.residual_scale == 1.0 else ScaledPreNorm
        return kind(hidden_size, sublayers, norm, dropout, self)


class PreNorm(Block):
    """A wiring that never normalises the residual stream itself; the stack adds a norm at its end."""

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: PreNormConfig):
        super().__init__(hidden_size, norms, norm, dropout)
        self.finite = config.finite
        if not config.first_norm:
            self.norms[0] = nn.Identity()  # not removed: the other norms keep their indices

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = x + dropout(f(norm(x))) for each f in turn."""
        # x itself is never normalized, so gradients reach every layer through the identity path.
        add = finite_sum if self.finite else torch.add
        for norm, sublayer in zip(self.norms, sublayers):
            y = sublayer(norm(x) if valid is None else normalize(norm, x, valid))
            x = add(x, self.dropout(y) if self.training else y)
        return x


class ScaledPreNorm(PreNorm):
    """The wiring x = x + scale * f(norm(x)), with the scale `residual_scale`."""

    def __init__(self, hidden_size: int, norms: int, norm: NormConfig, dropout: float, config: PreNormConfig):
        super().__init__(hidden_size, norms, norm, dropout, config)
        self.scale = config.residual_scale

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = x + dropout(scale * f(norm(x))) for each f in turn."""
        return super().forward(x, [partial(self._scaled, sublayer) for sublayer in sublayers], valid)

    def _scaled(self, sublayer: SubLayer, x: Tensor) -> Tensor:
        return sublayer(x) * self.scale


def finite_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in the type of x, with values beyond the range of float16 clamped where it is float16."""
    if y.dtype == torch.float16 != x.dtype:  # an infinite y would make a sum in float32 infinite
        return x + y.clamp(-FLOAT16_MAX, FLOAT16_MAX)
    z = x + y
    return z.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(x.dtype) if x.dtype == torch.float16 else z


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig(BlockConfig):
    """Parallel block: all sub-layers read the same normalised input, and their outputs are summed.

    `separate_norms`: whether every sub-layer has a norm of its own, as in GPT-NeoX.
    """

    separate_norms: bool = False

    kind: ClassVar[str] = "parallel"
    paper: ClassVar[str] = "Wang and Komatsuzaki 2021 (GPT-J)"

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Parallel":
        return Parallel(hidden_size, sublayers if self.separate_norms else 1, norm, dropout)

    @classmethod
    def examples(cls) -> tuple["ParallelConfig", ...]:
        return cls(), cls(separate_norms=True)


class Parallel(Block):
    """A wiring of sub-layers in parallel."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Return x + sum_f dropout(f(norm(x)))."""
        # Normalised before the loop: the sums below must not change the input of later sub-layers.
        normed = [normalize(norm, x, valid) for norm in self.norms]
        if len(normed) == 1:
            normed *= len(sublayers)  # all sub-layers read one norm
        for sublayer, read in zip(sublayers, normed):
            x = x + self.dropout(sublayer(read))
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandwichConfig(BlockConfig):
    """Sandwich block: a norm before and a norm after each sub-layer, inside the residual branch.

    Values of the residual stream then grow with the number of layers only, which avoids overflow in half
    precision. Gemma 2 and 3 have this wiring, OLMo 2 has it without the first norm.

    `input_norm`: whether there is a norm before a sub-layer; OLMo 2 only has the norm after it.
    """

    input_norm: bool = True

    kind: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = "Ding et al. 2021 (CogView), section 2.4"

    @classmethod
    def examples(cls) -> tuple["SandwichConfig", ...]:
        return cls(), cls(input_norm=False)

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Sandwich":
        return Sandwich(hidden_size, sublayers, norm, dropout, self.input_norm)


class Sandwich(Block):
    """A wiring that normalises what each sub-layer adds to the residual stream."""

    def __init__(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float, input_norm: bool):
        super().__init__(hidden_size, sublayers if input_norm else 0, norm, dropout)
        self.output_norms = nn.ModuleList(norm.build(hidden_size) for _ in range(sublayers))

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply x = x + dropout(norm(f(norm(x)))) for each f in turn."""
        for number, sublayer in enumerate(sublayers):
            read = normalize(self.norms[number], x, valid) if len(self.norms) else x
            x = x + self.dropout(normalize(self.output_norms[number], sublayer(read), valid))
        return x

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return norm(x), or x if there is no norm before a sub-layer."""
        return super().pre_norm(x) if len(self.norms) else x


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReversibleConfig(BlockConfig):
    """Reversible block: inputs are recomputed from outputs and need not be stored.

    Each sub-layer reads one of two streams and changes the other: a step (a, b) -> (b, a +
    dropout(f(norm(b)))). With attention and feed-forward, two steps are the equations; cross-attention adds a
    third step of the same form. Training stores only the last outputs (`stack.reversible`).

    The stack starts with x1 = x2 = x and ends with the mean of both streams. With `join="concat"`, as in
    Reformer, it ends with their concatenation, and the final norm and the head read twice the width. The
    streams have twice the precision of the sub-layers, so that subtracting an addend again leaves almost no
    error, in half precision too.
    """

    join: Literal["mean", "concat"] = "mean"  # of the two streams, at the end of the stack

    kind: ClassVar[str] = "reversible"
    paper: ClassVar[str] = "Gomez et al. 2017, section 3.1; Kitaev et al. 2020 (Reformer), section 3"
    reversible: ClassVar[bool] = True

    def width(self, hidden_size: int) -> int:
        """Return hidden_size, or twice hidden_size if the streams are concatenated."""
        return 2 * hidden_size if self.join == "concat" else hidden_size

    def build(self, hidden_size: int, sublayers: int, norm: NormConfig, dropout: float) -> "Reversible":
        return Reversible(hidden_size, sublayers, norm, dropout)


class Reversible(Block):
    """A wiring that passes the two streams x [2, B, T, E] through sub-layers [B, T, E] -> [B, T, E]."""

    def forward(self, x: Tensor, sublayers: Sequence[SubLayer], valid: Tensor | None = None) -> Tensor:
        """Apply (a, b) -> (b, a + dropout(f(norm(b)))) for each f in turn."""
        # The streams swap roles after each sub-layer, so every second sub-layer changes the same stream.
        a, b = x
        for index, sublayer in enumerate(sublayers):
            a, b = b, a + self.residual_branch(index, sublayer, b)
        return torch.stack([a, b])

    def residual_branch(self, index: int, sublayer: SubLayer, x: Tensor) -> Tensor:
        """Return the output of sub-layer `index` for a stream x [B, T, E]: the addend of the other stream."""
        return self.dropout(sublayer(self._normed(index, x)))

    def pre_norm(self, x: Tensor) -> Tensor:
        """Return norm(x2), where x2 is the second stream."""
        return self._normed(0, x[1])

    def memory_input(self, x: Tensor) -> Tensor:
        """Return x2, the second stream."""
        return x[1]

    def pre_norm_memory(self, memory: Tensor) -> Tensor:
        """Return norm(x2) of a stored x2."""
        return self._normed(0, memory)

    def _normed(self, index: int, x: Tensor) -> Tensor:
        # The streams have a higher precision than the sub-layers: cast to the type of the weights.
        norm = self.norms[index]
        dtype = next((parameter.dtype for parameter in norm.parameters()), x.dtype)
        return norm(x.to(dtype))


def split_streams(x: Tensor) -> Tensor:
    """Return the input x [B, T, E] of the stack as both streams, [2, B, T, E]."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    if half or x.device.type == "mps":  # MPS has no float64
        return torch.stack([x, x]).float()
    return torch.stack([x, x]).double()


def merge_streams(x: Tensor, dtype: torch.dtype, join: str = "mean") -> Tensor:
    """Return both streams [2, B, T, E] joined to [B, T, E] or, for "concat", [B, T, 2 E]."""
    return (torch.cat([x[0], x[1]], -1) if join == "concat" else x.mean(0)).to(dtype)
