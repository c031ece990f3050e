"""The Compressive Transformer's memory: the oldest vectors of the recent memory are compressed, not dropped.

    [m, h] -> old, m'     m' the last `length` of them, old the vectors before, in groups of `rate`
    cm' = the last `compressed_length` of [cm, f(old)]
    k, v = [SG(cm), SG(m), h] (W_k, W_v)

with h [B, T, E] the input of a layer for the segment, m [B, M, E] the input for the tokens before, cm
[B, C, E] and f one of `COMPRESSIONS`. No gradient of the main loss reaches f. It learns to preserve
the results of attention, or the memory itself, with a loss that trains only f (`reconstruction`):

    attention     | attention(h, old) - attention(h, f(old)) |^2, by content, its weights constant
    autoencoding  | old - g(f(old)) |^2, g a linear map of a vector to `rate` vectors

Rae et al. 2020, sections 3.1 and 3.2; the squares are means over all numbers. Tokens that do not fill a group
stay in m until there are `rate` of them. Positions are consecutive over slots, as in the paper: the slots of
cm come right before the slots of m. A group that contains padding, or tokens of two documents, is masked.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from polyformer.attention.positions import Shape
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.ops.layers import add_auxiliary_loss
from polyformer.core.ranges import NonNegativeInt, PositiveInt, Wording
from polyformer.core.sequence.tokens import Tokens
from polyformer.core.state import State
from polyformer.nn.memory.base import Memory, MemoryConfig, MemoryLayer

Usage = Callable[[Tensor], Tensor]
"""A function that returns the attention weight of every vector of a memory [B, M, E]: [B, M]."""


class Compression(nn.Module):
    """A function f: old [B, G, rate, E], the groups in order, to [B, G, E]. Rae et al. 2020, section 3.1.

    A layer uses only the weights with its index.
    """

    def __init__(self, layers: int, width: int, rate: int):
        super().__init__()
        self.rate = rate

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Compress [B, G, rate, E] to [B, G, E]."""
        raise NotImplementedError


class MeanCompression(Compression):
    """Mean pooling."""

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return sum_r old_r / rate."""
        return old.mean(2)


class MaxCompression(Compression):
    """Max pooling."""

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return max_r old_r, for each feature separately."""
        return old.amax(2)


class MostUsedCompression(Compression):
    """Selection of the vector in every group to which the last segment attended the most."""

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return the old_r with the largest usage."""
        # [B, G, rate] -> [B, G], the index of the most used vector in its group.
        best = usage(old.flatten(1, 2)).unflatten(1, old.shape[1:3]).argmax(2)
        return old.take_along_dim(best[:, :, None, None], 2).squeeze(2)


class ConvolutionCompression(Compression):
    """A convolution with kernel and stride `rate`."""

    def __init__(self, layers: int, width: int, rate: int):
        super().__init__(layers, width, rate)
        self.maps = nn.ModuleList(nn.Linear(rate * width, width) for _ in range(layers))

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Return sum_r W_r old_r + b."""
        return self.maps[layer](old.flatten(2))


class DilatedCompression(Compression):
    """Convolutions of kernel 2 with dilations 1, 2, 4, ... until the last output sees the whole group, with a
    ReLU between them; the group is padded with zeros on the left."""

    def __init__(self, layers: int, width: int, rate: int):
        super().__init__(layers, width, rate)
        self.dilations = [2**k for k in range((rate - 1).bit_length())]
        self.maps = nn.ModuleList(
            nn.ModuleList(nn.Linear(2 * width, width) for _ in self.dilations) for _ in range(layers)
        )

    def forward(self, old: Tensor, layer: int, usage: Usage) -> Tensor:
        """Apply x_t = W [x_(t - dilation), x_t] + b for each convolution in turn, and return the last x."""
        x = old
        for number, (dilation, part) in enumerate(zip(self.dilations, self.maps[layer])):  # type: ignore[call-overload]
            x = F.relu(x) if number else x
            # Kernel 2: every output reads x_t and x_(t - dilation), zeros before the group.
            x = part(torch.cat([F.pad(x, (0, 0, dilation, 0))[:, :, : self.rate], x], -1))
        return x[:, :, -1]


COMPRESSIONS: dict[str, type[Compression]] = {
    "mean": MeanCompression,
    "max": MaxCompression,
    "most_used": MostUsedCompression,
    "convolution": ConvolutionCompression,
    "dilated": DilatedCompression,
}
LEARNED = ["convolution", "dilated"]
"""The compressions that have weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressiveConfig(MemoryConfig):
    """Compressive memory: old hidden states are compressed before they are dropped.

    It has the last `length` tokens uncompressed, and before them `compressed_length` vectors of `rate` tokens
    each.

    compression: mean, max, most_used, convolution or dilated. loss: for the training of the last two,
    attention or autoencoding; by default attention.
    """

    length: NonNegativeInt = 128
    compressed_length: Annotated[
        PositiveInt, Wording(fix="without compressed vectors use the memory 'recurrent'")
    ] = 128
    rate: Annotated[int, Ge(2)] = 3
    compression: str = "convolution"
    loss: Literal["attention", "autoencoding"] | None = None

    kind: ClassVar[str] = "compressive"
    paper: ClassVar[str] = "Rae et al. 2020 (Compressive Transformer), section 3"
    reversible: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            raise unknown("compression", self.compression, COMPRESSIONS)
        if self.loss is not None and self.compression not in LEARNED:
            raise InputError(
                f"memory.loss: compression {quote(self.compression)} has no weights; leave the loss out"
            )

    @classmethod
    def examples(cls) -> tuple["CompressiveConfig", ...]:
        """Return a learned compression, another that needs attention weights, and both losses."""
        return cls(), cls(rate=2, loss="autoencoding"), cls(compression="most_used")

    def build(self, shape: Shape) -> "Compressive":
        return Compressive(self, shape)


@dataclasses.dataclass(frozen=True)
class CompressedHidden(State):
    """The inputs of a layer: recent [B, M, E], and compressed [B, C, E]; None while there are none."""

    recent: Tensor | None = None
    compressed: Tensor | None = None


class Compressive(Memory):
    """A queue of recent vectors, followed by a queue of compressed vectors."""

    supports_kv_cache = False  # hidden states are compressed, not keys

    def __init__(self, config: CompressiveConfig, shape: Shape):
        super().__init__(config.length)
        self.rate, self.compressed_length = config.rate, config.compressed_length
        layers, width = shape.num_layers, shape.hidden_size
        self.compress = COMPRESSIONS[config.compression](layers, width, config.rate)
        self.loss = (config.loss or "attention") if config.compression in LEARNED else None
        self.decoders: nn.ModuleList | None = None
        if self.loss == "autoencoding":
            self.decoders = nn.ModuleList(nn.Linear(width, config.rate * width) for _ in range(layers))

    def new_state(self, layer: int) -> CompressedHidden:
        return CompressedHidden()

    def past_inputs(self, state: State) -> Tensor | None:
        """Return [cm, m]."""
        assert isinstance(state, CompressedHidden)
        # Compressed vectors are older: they come first, as the slots before the recent memory.
        parts = [part for part in (state.compressed, state.recent) if part is not None]
        return torch.cat(parts, 1) if parts else None

    def next_state(self, state: State, x: Tensor, layer: MemoryLayer) -> CompressedHidden:
        """Return the state with m' and cm'; in training this also adds the term of the loss."""
        assert isinstance(state, CompressedHidden)
        x = x.detach()
        recent = x if state.recent is None else torch.cat([state.recent.to(x.dtype), x], 1)
        groups = self._num_groups(recent.shape[1])
        # Fewer than `rate` tokens exceed the length of the recent memory.
        if not groups:
            return CompressedHidden(recent if state.recent is not None else x.clone(), state.compressed)
        old = recent[:, : groups * self.rate]
        new = self.compress(
            old.unflatten(1, (groups, self.rate)),
            layer.index,
            lambda vectors: layer.content_attention(x, vectors)[1].mean((1, 2)),
        )
        if self.training and self.loss is not None:
            add_auxiliary_loss("compression", self._reconstruction_loss(x, old, new, layer))
        # f is trained only by the reconstruction loss, not by later segments.
        new = new.detach()
        if state.compressed is not None:
            new = torch.cat([state.compressed.to(x.dtype), new], 1)
        # Copied, because a slice would keep the whole queue in memory.
        kept = new[:, -self.compressed_length :].clone()
        return CompressedHidden(recent[:, groups * self.rate :].clone(), kept)

    def _reconstruction_loss(self, x: Tensor, old: Tensor, new: Tensor, layer: MemoryLayer) -> Tensor:
        """Return the loss of information in new [B, G, E], compared with old [B, G rate, E]."""
        if self.decoders is not None:
            # | old - g(f(old)) |^2
            return (old - self.decoders[layer.index](new).view_as(old)).square().mean()
        # | attention(h, old) - attention(h, f(old)) |^2
        return (layer.content_attention(x, old)[0] - layer.content_attention(x, new)[0]).square().mean()

    def _num_groups(self, recent: int) -> int:
        """Return the number of groups that leave a recent memory of `recent` vectors."""
        return max(0, recent - self.length) // self.rate

    def remembered_tokens(self, tokens: Tokens) -> Tokens:
        """Return the slots after compression. The last token of a group represents it; it is masked unless
        all tokens of the group are real and of the same document."""
        first = tokens.merged
        groups = self._num_groups(tokens.length - first)
        if not groups:
            return tokens
        # Slots first..last are merged, `rate` to one; at most compressed_length remain.
        last, merged = first + groups * self.rate, min(first + groups, self.compressed_length)

        def merge(table: Tensor) -> Tensor:
            ends = table[:, first:last].unflatten(1, (groups, self.rate))[:, :, -1]
            return torch.cat([torch.cat([table[:, :first], ends], 1)[:, -merged:], table[:, last:]], 1)

        length = merged + tokens.length - last
        shorter = tokens.map(merge)
        changes: dict[str, Tensor] = {}
        valid = self._valid_slots(tokens, first, last)
        if valid is not None:
            changes["valid"] = merge(valid)
        if tokens.pos is not None and shorter.pos is not None:  # consecutive, up to the first uncompressed
            end = tokens.pos[:, last - 1 : last] + 1 - merged
            run = end + torch.arange(merged, device=end.device)
            changes["pos"] = torch.cat([run, shorter.pos[:, merged:]], 1)
        return dataclasses.replace(
            shorter, length=length, dropped=tokens.seen - length, merged=merged, **changes
        )

    def _valid_slots(self, tokens: Tokens, first: int, last: int) -> Tensor | None:
        """Return which slots are real, [B, L]; the slots of a group are real only if all are, and all are of
        the same document. None if all slots are real."""
        if tokens.valid is not None:
            valid = tokens.valid
        elif tokens.doc is not None:
            valid = torch.ones_like(tokens.doc, dtype=torch.bool)
        else:
            return None
        # [B, groups].
        complete = valid[:, first:last].unflatten(1, (-1, self.rate)).all(2)
        if tokens.doc is not None:
            doc = tokens.doc[:, first:last].unflatten(1, (-1, self.rate))
            complete &= doc[:, :, 0] == doc[:, :, -1]  # they do not decrease
        groups = complete.repeat_interleave(self.rate, 1)
        return torch.cat([valid[:, :first], groups, valid[:, last:]], 1)
