"""The rules of transformers' mask functions, read from the functions themselves.

`create_causal_mask` and similar functions compose small functions of indices (`causal_mask_function`,
`sliding_window_overlay(w)`, `and_masks(...)`, ...). Known functions become settings of `attend`: causality,
documents, padding, a window. Any other remains a function, which `attend` accepts unchanged.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils as theirs

from polyformer.attention.patterns.base import MaskMod, Pattern
from polyformer.attention.patterns.composition import MaskModPattern
from polyformer.attention.patterns.windows import Window

# The number of keys after the query in a window without a limit there.
UNLIMITED = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class SlotIndex:
    """The place of a call's keys: slots 0 .. kv_length - 1 are tokens kv_offset, kv_offset + 1, ..."""

    batch_size: int
    kv_length: int
    kv_offset: int
    device: torch.device

    @property
    def tokens(self) -> Tensor:
        """The number of each key's token, [Tk]."""
        return torch.arange(self.kv_length, device=self.device) + self.kv_offset


@dataclasses.dataclass(frozen=True, eq=False)
class MaskRule:
    """The rule for attended pairs: every condition that is set must allow a key."""

    causal: bool = False
    documents: Tensor | None = None  # [B, Tk], not decreasing; tokens with equal numbers see each other
    valid: Tensor | None = None  # [B, Tk], False at padding
    pattern: Pattern | None = None

    def __and__(self, other: "MaskRule") -> "MaskRule":
        return MaskRule(
            self.causal or other.causal,
            combine(self.documents, other.documents, _both_documents),
            combine(self.valid, other.valid, torch.logical_and),
            combine(self.pattern, other.pattern, lambda mine, more: mine & more),
        )


def combine(mine: Any, more: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Return the two joined, or the value that is not None."""
    if mine is None or more is None:
        return more if mine is None else mine
    return join(mine, more)


def rule_of(function: MaskMod, place: SlotIndex, positions: Tensor | None = None) -> MaskRule:
    """Return the rule of a mask function for the keys at `place`.

    positions: [B, Tk], the numbers that the function uses instead of token numbers (packed sequences).
    """
    if function is theirs.causal_mask_function:
        return MaskRule(causal=True)
    if function is theirs.bidirectional_mask_function:
        return MaskRule()
    own = dict(_captured(function))
    match _name(function):
        case "and_masks":
            parts = own["mask_functions"]
            with_packed_sequences = positions is not None or any(
                _name(part) == "packed_sequence_mask_function" for part in parts
            )
            return _all(parts, place, positions, with_packed_sequences)
        case "sliding_window_overlay":
            # Their number includes the query's own token; causality hides the keys after it.
            return MaskRule(pattern=Window(own["sliding_window"] - 1, UNLIMITED))
        case "sliding_window_bidirectional_overlay":
            return MaskRule(pattern=Window(own["sliding_window"], own["sliding_window"]))
        case "chunked_overlay":
            tokens = place.tokens if positions is None else positions
            chunks = (tokens - own["left_padding"].view(-1, 1)) // own["chunk_size"]
            return MaskRule(documents=chunks.expand(place.batch_size, -1))
        case "padding_mask_function":
            return MaskRule(valid=own["padding_mask"][:, place.tokens].bool())
        case "packed_sequence_mask_function":
            return MaskRule(documents=own["packed_sequence_mask"].expand(place.batch_size, -1))
    return MaskRule(pattern=_as_pattern(function, place, positions))


def _all(
    parts: tuple[MaskMod, ...], place: SlotIndex, positions: Tensor | None, with_packed_sequences: bool
) -> MaskRule:
    """Return the combined rule of several functions."""
    rule = MaskRule()
    for part in parts:
        if with_packed_sequences and _name(part) == "remap_positions_for_packed_sequence":
            own = dict(_captured(part))  # positions rise by 1 per slot within a sequence
            rule &= rule_of(own["mask_function"], place, own["position_ids"])
        else:
            rule &= rule_of(part, place, positions)
    return rule


def _as_pattern(function: MaskMod, place: SlotIndex, positions: Tensor | None) -> Pattern:
    """Return any function of token numbers (or positions) as a pattern of slots."""
    first = place.kv_offset
    if positions is not None:
        return MaskModPattern(
            lambda b, h, q_idx, kv_idx: function(b, h, positions[b, q_idx], positions[b, kv_idx])
        )
    if not first:
        return MaskModPattern(function)
    return MaskModPattern(lambda b, h, q_idx, kv_idx: function(b, h, q_idx + first, kv_idx + first))


def _name(function: MaskMod) -> str:
    """Return the name of the function of transformers that made this function; "" for other functions."""
    if getattr(function, "__module__", None) != theirs.__name__:
        return ""
    return function.__qualname__.partition(".<locals>")[0]


def _captured(function: MaskMod) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function has captured, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield name, cell.cell_contents


def _both_documents(a: Tensor, b: Tensor) -> Tensor:
    """Return numbers that are equal where both inputs are equal, and rise where either input rises."""
    # Pairs (a, b) in lexicographic order.
    least = b.min()
    return a * (b.max() - least + 1) + (b - least)
