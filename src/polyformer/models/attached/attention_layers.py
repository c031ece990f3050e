"""The attention layers of a transformers model, which dispatch through `AttentionInterface`.

Their rotary positions are counted inside a bounded cache. A layer rotates its queries before it calls the
attention function. For its products with the first tokens a query is rotated further
(`attention.positions.base.SinkCache`), by the frequencies of the model's own rotary module. The layout of the
channels is read from the layer itself: for one token at two positions, the second query is the first,
rotated.
"""

import dataclasses
import fnmatch
import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.positions import Position, Site
from polyformer.attention.positions.added import NoPosition
from polyformer.attention.positions.base import angle_dtype
from polyformer.attention.positions.rope import ChannelPairs, Layout, RotationInCache
from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context

# Names of layers with keys of another sequence.
CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_decoder|encoder_attention", re.IGNORECASE)

HEADS = "num_heads", "num_attention_heads", "n_heads", "n_head"


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """An attention layer: its module, dotted name, and number in its stack."""

    module: nn.Module
    name: str
    index: int
    cross: bool  # keys of another sequence

    @property
    def num_heads(self) -> int:
        """The number of query heads; raises `InputError` if neither module nor configuration has it."""
        for owner in (self.module, getattr(self.module, "config", None)):
            for name in HEADS:
                number = getattr(owner, name, None)
                if isinstance(number, int):
                    return number
        raise InputError(f"position: the number of heads of {self.name} is unknown")


def attention_layers(model: nn.Module) -> list[Layer]:
    """Return all attention layers of a model that dispatch, in the model's order."""
    layers, counts = [], dict[str, int]()
    for name, module in model.named_modules():
        if uses_attention_interface(type(module)):
            stack = re.sub(r"\d+", "*", name)
            place = counts.get(stack, 0)
            counts[stack] = place + 1
            own = getattr(module, "layer_idx", None)
            cross = bool(CROSS.search(f"{name} {type(module).__name__}")) or is_cross(module)
            layers.append(Layer(module, name, own if isinstance(own, int) else place, cross))
    return layers


def is_cross(module: Any) -> bool:
    """Return whether a module declares itself as cross-attention."""
    return bool(getattr(module, "is_cross_attention", False))


@functools.cache
def uses_attention_interface(kind: type[nn.Module]) -> bool:
    """Return whether modules of this class dispatch through the interface."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
    return "ALL_ATTENTION_FUNCTIONS" in source


def select_layers(layers: list[Layer], which: Iterable[int | str] | int | str | None) -> list[Layer]:
    """Return the self-attention layers of `which`: numbers in their stacks, or names with `*`; None for all.

    A name may be a part of the full name: "encoder" or "text_model.*.3". Raises `InputError` if no layer has
    the number or name.
    """
    own = [layer for layer in layers if not layer.cross]
    if which is None:
        return own
    found_by = [which] if isinstance(which, int | str) else list(which)
    for part in found_by:
        if not any(_matches(layer, part) for layer in own):
            if not own:
                raise InputError(f"layers: the model has no self-attention layers, got {quote(part)}")
            stacks = sorted({re.sub(r"\d+", "*", layer.name) for layer in own})
            numbers = sorted({layer.index for layer in own})
            raise InputError(
                f"layers: no self-attention layer is called {quote(part)}; there are {', '.join(stacks)}, "
                f"numbered {numbers[0]} to {numbers[-1]}"
            )
    return [layer for layer in own if any(_matches(layer, part) for part in found_by)]


def _matches(layer: Layer, part: int | str) -> bool:
    if isinstance(part, int):
        return layer.index == part
    return fnmatch.fnmatchcase(f".{layer.name}.", f"*.{part}.*")


# The implementation in `AttentionInterface` that only reads the queries of a layer.
QUERIES_ONLY = "polyformer_queries_only"

# Types of RoPE with frequencies that depend on the length of a text.
BY_LENGTH = "dynamic", "longrope"

LAYOUTS: tuple[Layout, ...] = ("halves", "pairs")


def refusal(argument: str, reason: str) -> InputError:
    """Return the error for a layer with positions that a rule for its cache cannot read."""
    return InputError(
        f"{argument}: {reason}; convert the model (`polyformer convert`), or leave out {argument}"
    )


class QueriesReadError(Exception):
    """The queries of a layer, which ends its call."""

    def __init__(self, queries: Tensor):
        super().__init__()
        self.queries = queries


def read_queries(module: nn.Module, query: Tensor, *inputs: Any, **options: Any) -> None:
    """Raise `QueriesReadError`: an attention function for `AttentionInterface` that computes nothing."""
    raise QueriesReadError(query)


@dataclasses.dataclass(frozen=True, eq=False)
class Rotary:
    """The rotary module of a layer's model; `layer_type` selects its frequencies if it has several sets.

    argument: the argument of `attach` that needs it.
    """

    module: nn.Module
    argument: str
    layer: str
    layer_type: str | None = None

    @property
    def frequencies(self) -> Tensor:
        """The angles [W/2] between two neighbouring positions."""
        name = "inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"
        frequencies = getattr(self.module, name)
        assert isinstance(frequencies, Tensor)
        return frequencies.to(angle_dtype(frequencies.device))

    def position(self, layer: nn.Module) -> Position:
        """Return the position scheme of a layer with loaded weights.

        Raises `InputError` for a layer that does not rotate the first channels of its queries.
        """
        # By 300 positions most channels turn by more than the rounding of half precision.
        first, later = (self._query(layer, position) for position in (0, 300))
        far = torch.full((1, 1, 1, 1), 300, device=first.device)
        if torch.equal(first, later):
            return NoPosition()
        # Models compute angles in float32 in every precision.
        limit = max(0.01, 2 * torch.finfo(later.dtype).eps ** 0.5) * float(later.norm())
        for layout in LAYOUTS:
            scheme = RotaryInCache(self, layout)
            if float((scheme.rotated(first, far) - later).norm()) < limit:
                return scheme
        raise refusal(
            self.argument,
            f"{self.layer} changes its queries by position in another way than a rotation of their first "
            "channels",
        )

    @torch.no_grad()
    def _query(self, layer: Any, position: int) -> Tensor:
        """Return the query [1, H, 1, D] of a fixed token at a position."""
        like = next(layer.parameters())
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        token = torch.linspace(-1, 1, layer.config.hidden_size, dtype=dtype, device=like.device).view(
            1, 1, -1
        )
        place = torch.tensor([[position]], device=like.device)
        waves = self.module(token, place, *([] if self.layer_type is None else [self.layer_type]))
        before, layer.config._attn_implementation = layer.config._attn_implementation, QUERIES_ONLY
        try:
            layer(hidden_states=token, position_embeddings=waves, attention_mask=None)
        except QueriesReadError as read:
            return read.queries
        finally:
            layer.config._attn_implementation = before
        raise refusal(self.argument, f"{self.layer} does not use transformers' AttentionInterface")


class RotaryInCache(Position):
    """The scheme of a layer that rotates its own queries and keys: the rotations inside a cache."""

    counts_in_cache = True

    def __init__(self, rotary: Rotary, layout: Layout):
        super().__init__()
        self.rotary = rotary
        self.layout: Layout = layout

    def rotated(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return q [B, H, T, D], rotated by numbers of positions [B or 1, 1, T or 1, 1]."""
        theta = self.rotary.frequencies
        pairs = ChannelPairs(self.layout, 2 * len(theta))
        return pairs.rotate(q, *pairs.cos_sin(positions * theta, q.dtype))

    def rotate_in_cache(self, q: Tensor, context: Context, site: Site) -> Tensor:
        """Return the rotated queries for distant first tokens, as the last entry of `cache`."""
        return self._rotation().queries(q, context)

    def keys_in_cache(self, q: Tensor, k: Tensor, context: Context, site: Site) -> Tensor | None:
        """Return all keys, rotated so that a single query has its distances in `cache`."""
        return self._rotation().keys(q, k, context)

    def _rotation(self) -> RotationInCache:
        assert self.cache is not None
        pairs = ChannelPairs(self.layout, 2 * len(self.rotary.frequencies))
        key = id(self.rotary.module), self.rotary.layer_type
        return RotationInCache(pairs, lambda: self.rotary.frequencies, self.cache, key)


def find_rotary(model: nn.Module, layer: Layer, argument: str) -> Rotary:
    """Return the rotary module of a layer, for an argument of `attach`: the nearest in the model's tree.

    Raises `InputError` for a model without rotary positions, with frequencies that depend on the length of
    the text, and for a layer that is not a decoder's.
    """
    if not getattr(layer.module, "is_causal", True):
        raise InputError(
            f"{argument}: expected decoder layers, but {layer.name} reads later tokens; name the decoder's "
            "layers by `layers`"
        )
    near = {name: module for name, module in model.named_modules() if _frequency_names(module)}
    if not near:
        raise refusal(argument, f"expected rotary positions, which {type(model).__name__} lacks")
    module = near[max(near, key=lambda name: _common(name, layer.name))]
    kind = _layer_type(layer.module)
    names = _frequency_names(module)
    by_type = None if "inv_freq" in names else kind
    if by_type is not None and f"{by_type}_inv_freq" not in names:
        raise refusal(argument, f"the frequencies of {layer.name} are unknown")
    types = getattr(module, "rope_type", "default")
    rope_type = types.get(by_type) if isinstance(types, dict) else types
    if rope_type in BY_LENGTH:
        raise refusal(
            argument,
            f"rope_type {quote(rope_type)} has frequencies that depend on the length of a text, expected "
            "'default', 'linear', 'yarn' or 'llama3'; set rope_parameters",
        )
    return Rotary(module, argument, layer.name, by_type)


def _frequency_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own tables of frequencies."""
    return [name for name in module._buffers if name.endswith("inv_freq") and "original" not in name]


def _layer_type(module: Any) -> str | None:
    """Return the type of a layer, such as "full_attention", if its model has several."""
    types = getattr(module.config, "layer_types", None)
    return None if types is None else types[module.layer_idx]


def _common(name: str, other: str) -> int:
    """Return how many first parts two dotted names share."""
    shared = 0
    for a, b in zip(name.split("."), other.split(".")):
        if a != b:
            break
        shared += 1
    return shared
