"""Masks of transformers' models: passed on as a description, or read from a tensor over all pairs.

A `Mask` has the type and shape of a tensor, [B, 1, Tq, Tk] of bool, so that models pass it on like any mask,
but stores only one number. Any computation with it gets the entries, which are made at that moment.

`create_causal_mask` and similar functions compose small functions of indices (`causal_mask_function`,
`sliding_window_overlay(w)`, `and_masks(...)`, ...), from which their rules are read. Known functions become
settings of `attend`: causality, documents, padding, a window. Any other remains a function, which `attend`
accepts unchanged.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import masking_utils as theirs

from polyformer.attention.functional.request import is_traced
from polyformer.attention.patterns.base import MaskMod, Pattern, ScoreMod
from polyformer.attention.patterns.composition import MaskModPattern
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import step
from polyformer.attention.patterns.windows import Window
from polyformer.core.sequence.context import Context, positions_from_mask

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


# Functions that only read the type and the shape.
METADATA_FUNCTIONS = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.stride,
    Tensor.storage_offset,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.size,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
}

# Functions that return the tensor itself if no change is required.
IDENTITY_FUNCTIONS = {Tensor.to, Tensor.contiguous, Tensor.detach, Tensor.bool}


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """The arguments of a mask function of transformers: sizes, and the attended pairs."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor  # the number of the first query's token; a static cache counts it in a tensor
    kv_offset: int
    function: Callable[..., Any]
    attention_mask: Tensor | None  # [B, tokens], False at padding
    use_vmap: bool
    device: torch.device
    rule: MaskRule  # of `function`, for all slots
    entries: Tensor | None = None  # [B, 1, Tq, Tk] in a compiled graph, where `function` cannot be read

    def dense(self) -> Tensor:
        """Return all entries, [B, 1, Tq, Tk] bool."""
        if self.entries is not None:
            return self.entries[..., : self.kv_length]
        mask = theirs.sdpa_mask(
            batch_size=self.batch_size,
            q_length=self.q_length,
            kv_length=self.kv_length,
            q_offset=self.q_offset,  # type: ignore[arg-type]  # their code takes the cache's tensor
            kv_offset=self.kv_offset,
            mask_function=self.function,
            attention_mask=self.attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )
        return cast(Tensor, mask)

    def cropped(self, kv_length: int) -> "Description":
        """Return the description for the first `kv_length` keys."""
        return self if kv_length == self.kv_length else dataclasses.replace(self, kv_length=kv_length)

    @property
    def num_slots(self) -> int:
        """The number of slots of keys and queries. Only in a static cache do the keys include all queries."""
        if isinstance(self.q_offset, Tensor):
            return self.kv_length
        return max(self.kv_length, self.q_offset - self.kv_offset + self.q_length)

    @property
    def pattern(self) -> Pattern | None:
        """The part of the mask that the context does not describe."""
        pattern = self.rule.pattern
        if self.rule.causal and isinstance(pattern, Window):
            return Window(pattern.before, 0)
        return pattern

    @functools.cached_property
    def context(self) -> Context:
        """The slots, positions, documents and padding of queries and keys, the same object for all layers."""
        return dataclasses.replace(self, q_offset=int(self.q_offset)).make_context()

    def make_context(self) -> Context:
        """Return `context`, newly computed. A compiled graph reads no tensor for it: `q_start` may be one."""
        tokens, keys = self._tokens, slice(self.kv_length)
        start: Any = self.q_offset - self.kv_offset
        queries = start + torch.arange(self.q_length, device=self.device)
        valid = combine(
            None if tokens is None else tokens[:, self.kv_offset :], self.rule.valid, torch.logical_and
        )
        tables: dict[str, Any] = {} if valid is None else {"kv_valid": valid[:, keys]}
        for name, table in (("doc", self.rule.documents), ("pos", self._positions(tokens))):
            if table is not None:
                tables |= {f"q_{name}": table[..., queries], f"kv_{name}": table[..., keys]}
        return Context(self.q_length, self.kv_length, self.rule.causal, q_start=start, **tables)

    @property
    def _tokens(self) -> Tensor | None:
        """Return the mask of real tokens, including those before the first slot; None if all are real."""
        mask = theirs.prepare_padding_mask(self.attention_mask, self.num_slots, self.kv_offset)
        if mask is None:
            return None
        mask = mask[:, : self.kv_offset + self.num_slots].bool()
        return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask

    def _positions(self, tokens: Tensor | None) -> Tensor | None:
        """Return the positions of all slots, by row or shared; None if they equal the slot numbers."""
        if tokens is not None and (torch.compiler.is_compiling() or not bool(tokens[:, 0].all())):
            return positions_from_mask(tokens)[:, self.kv_offset :]
        if self.rule.documents is not None:
            return positions_in_documents(self.rule.documents)
        if not self.kv_offset:
            return None
        return torch.arange(self.num_slots, device=self.device) + self.kv_offset


def positions_in_documents(documents: Tensor) -> Tensor:
    """Return positions that restart with every document, [B, Tk]."""
    slots = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.diff(documents, prepend=documents[:, :1] - 1) != 0
    return slots - torch.where(begins, slots, 0).cummax(-1).values


class Mask(Tensor):
    """A mask [B, 1, Tq, Tk] of bool that stores one number; `description` defines its entries."""

    description: Description

    @staticmethod
    def of(description: Description) -> "Mask":
        """Return the mask of a description."""
        shape = description.batch_size, 1, description.q_length, description.kv_length
        # One number in memory, with strides of 0.
        entry = torch.zeros((), dtype=torch.bool, device=description.device)
        mask = entry.expand(shape).as_subclass(Mask)
        mask.description = description
        return mask

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return type and shape from the tensor itself; compute all other functions with the entries."""
        kwargs = kwargs or {}
        if function in METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        mask = args[0] if args else None
        if isinstance(mask, Mask):
            if function is Tensor.__getitem__ and (description := _sliced(mask.description, args[1])):
                return mask if description is mask.description else Mask.of(description)
            if function in IDENTITY_FUNCTIONS and _is_unchanged(mask.description, args[1:], kwargs):
                return mask
        with torch._C.DisableTorchFunctionSubclass():
            return function(*_entries(args), **{name: _entries(value) for name, value in kwargs.items()})


def _entries(value: Any) -> Any:
    """Return `value` with masks replaced by their entries."""
    if isinstance(value, Mask):
        return value.description.dense()
    return type(value)(map(_entries, value)) if type(value) in (list, tuple) else value


def _sliced(description: Description, index: Any) -> Description | None:
    """Return the description of an indexed mask, if the index selects all or the first keys; else None."""
    whole = (slice(None), Ellipsis)
    if not isinstance(index, tuple) or not all(isinstance(part, slice | type(Ellipsis)) for part in index):
        return None
    *before, last = index
    if any(part not in whole for part in before) or not isinstance(last, slice):
        return None
    if len(index) != 4 and Ellipsis not in before:
        return None
    # Layers crop the mask to the keys of a static cache.
    start, stop, step = last.indices(description.kv_length)
    return description.cropped(stop) if (start, step) == (0, 1) and stop > 0 else None


def _is_unchanged(description: Description, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Return whether a conversion to these types and devices leaves a mask unchanged."""
    wanted = [*arguments, *options.values()]
    return all(
        value is torch.bool
        or value is None
        or isinstance(value, bool)
        or (isinstance(value, str | torch.device) and torch.device(value) == description.device)
        for value in wanted
    )


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = theirs.causal_mask_function,
    *,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """Return a mask for `AttentionMaskInterface`: a `Mask`, or its entries in an exported graph.

    Args:
        batch_size, q_length, kv_length: B, Tq, Tk.
        q_offset, kv_offset: the numbers of the first query's and the first key's token.
        mask_function: the attended pairs, by those numbers.
        attention_mask: [B, tokens], False at padding.
        use_vmap: whether `mask_function` accepts only scalars.
        device: the device of the call.
    """
    if isinstance(q_offset, Tensor):  # a static cache increments this tensor, and all steps have one shape
        q_offset = q_offset.clone()
        attention_mask = theirs.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    description = Description(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        use_vmap,
        torch.device(device),
        MaskRule(),
    )
    # A graph cannot read the closures of mask functions.
    if is_traced():
        entries = description.dense()
        if not torch.compiler.is_dynamo_compiling():
            return entries
        return Mask.of(dataclasses.replace(description, entries=entries))
    rule = rule_of(mask_function, SlotIndex(batch_size, description.num_slots, kv_offset, description.device))
    return Mask.of(dataclasses.replace(description, rule=rule))


@dataclasses.dataclass(frozen=True, eq=False)
class Table(Pattern, named=False):
    """The pattern of a tensor [B or 1, H or 1, Tq or 1, Tk] of bool, True for attended keys."""

    entries: Tensor

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return entries[b, h, i, j]."""
        return look_up(self.entries, b, h, q_idx, kv_idx)


def look_up(table: Tensor, *places: Tensor) -> Tensor:
    """Return entries of a table; an axis of length 1 broadcasts."""
    index = [place if size > 1 else torch.zeros_like(place) for place, size in zip(places, table.shape)]
    return table[tuple(index)]


def add_bias(bias: Tensor) -> ScoreMod:
    """Return the function score + bias[b, h, i, j], for a tensor [B or 1, H or 1, Tq or 1, Tk]."""

    @step("bias of the pair")
    @broadcasts
    def add(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + look_up(bias, b, h, q_idx, kv_idx)

    return add


def split_mask(mask: Tensor, kv_length: int) -> tuple[Tensor | None, Tensor | None]:
    """Return a mask of any model as entries of bool and a bias, either None if it has no effect.

    mask: [B, Tk] with 0 at padding, or 4 axes that broadcast to [B, H, Tq, Tk]: bool, True for attended keys,
    or numbers to add to the scores; numbers near the minimum of their type hide a key.
    """
    if mask.dim() == 2:
        mask = mask[:, None, None, :].bool()
    if mask.dim() == 3:
        mask = mask[:, None]
    mask = mask[..., :kv_length]
    if mask.dtype == torch.bool:
        return mask, None
    # Libraries hide keys by the minimum, by half of it, or by -inf.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if torch.compiler.is_compiling() or mask.requires_grad:
        return ~hidden, mask.masked_fill(hidden, 0)
    seen = None if not bool(hidden.any()) else ~hidden
    bias = mask.masked_fill(hidden, 0)
    return seen, bias if bool(bias.any()) else None
