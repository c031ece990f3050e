"""The mask that transformers' models hand to their layers, as a description in place of n x n entries.

A `Mask` is a tensor by its type and shape, [B, 1, Tq, Tk] of bool, so that models pass it on as they pass
any mask, and holds one number. Whoever computes with it gets the entries, made then and there.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import masking_utils as theirs

from polyformer.inside.mask_functions import Place, Rule, both, rule_of
from polyformer.patterns.base import Pattern
from polyformer.patterns.window import Window
from polyformer.sequence.context import Context, positions_from_mask

LOOKS = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.dim,
    Tensor.ndimension,
    Tensor.size,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
}
"""What asks for the type and the shape alone."""

SAME = {Tensor.to, Tensor.contiguous, Tensor.detach, Tensor.bool}
"""What gives the tensor itself where there is nothing to change."""


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """What a mask function of transformers was asked for: queries and keys by number, and who sees whom."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    function: Callable[..., Any]
    attention_mask: Tensor | None  # [B, tokens], False at padding
    use_vmap: bool
    device: torch.device

    def dense(self) -> Tensor:
        """All entries, [B, 1, Tq, Tk] bool."""
        mask = theirs.sdpa_mask(
            batch_size=self.batch_size,
            q_length=self.q_length,
            kv_length=self.kv_length,
            q_offset=self.q_offset,
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
        """The same over the first keys."""
        return self if kv_length == self.kv_length else dataclasses.replace(self, kv_length=kv_length)

    @property
    def start(self) -> int:
        """The slot of the first query."""
        return self.q_offset - self.kv_offset

    @property
    def reach(self) -> int:
        """How many slots keys and queries lie in: queries may lie behind all keys."""
        return max(self.kv_length, self.start + self.q_length)

    @functools.cached_property
    def rule(self) -> Rule:
        """Who sees whom, padding included; its tables are of all slots."""
        rule = rule_of(self.function, Place(self.batch_size, self.reach, self.kv_offset, self.device))
        return dataclasses.replace(rule, valid=both(self._valid, rule.valid, torch.logical_and))

    @functools.cached_property
    def pattern(self) -> Pattern | None:
        """What the context does not say."""
        pattern = self.rule.pattern
        if self.rule.causal and isinstance(pattern, Window) and pattern.before:
            return Window(pattern.before, 0)
        return pattern

    @functools.cached_property
    def context(self) -> Context:
        """Where queries and keys stand."""
        rule, keys = self.rule, slice(self.kv_length)
        queries = slice(self.start, self.start + self.q_length)
        tables: dict[str, Any] = {} if rule.valid is None else {"kv_valid": rule.valid[:, keys]}
        for name, table in (("doc", rule.documents), ("pos", self._positions)):
            if table is not None:
                tables |= {f"q_{name}": table[..., queries], f"kv_{name}": table[..., keys]}
        return Context(self.q_length, self.kv_length, rule.causal, q_start=self.start, **tables)

    @property
    def _tokens(self) -> Tensor | None:
        """Which tokens are real, those before the first slot too; None where all are."""
        mask = theirs.prepare_padding_mask(self.attention_mask, self.reach, self.kv_offset)
        if mask is None:
            return None
        mask = mask[:, : self.kv_offset + self.reach].bool()
        return None if bool(mask.all()) else mask

    @property
    def _valid(self) -> Tensor | None:
        """Which slots are real."""
        tokens = self._tokens
        return None if tokens is None else tokens[:, self.kv_offset :]

    @property
    def _positions(self) -> Tensor | None:
        """The positions of all slots, by row or alike, where they are not their numbers."""
        tokens = self._tokens
        if tokens is not None and not bool(tokens[:, 0].all()):
            return positions_from_mask(tokens)[:, self.kv_offset :]
        if self.rule.documents is not None:
            return _counted(self.rule.documents)
        if not self.kv_offset:
            return None
        return torch.arange(self.reach, device=self.device) + self.kv_offset


def _counted(documents: Tensor) -> Tensor:
    """Positions that begin anew with every document, [B, Tk]."""
    slots = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.diff(documents, prepend=documents[:, :1] - 1) != 0
    return slots - torch.where(begins, slots, 0).cummax(-1).values


class Mask(Tensor):
    """A mask [B, 1, Tq, Tk] of bool with one number behind it; `description` says what it holds."""

    description: Description

    @staticmethod
    def of(description: Description) -> "Mask":
        """The mask of a description."""
        shape = description.batch_size, 1, description.q_length, description.kv_length
        entry = torch.zeros((), dtype=torch.bool, device=description.device)
        mask = entry.expand(shape).as_subclass(Mask)
        mask.description = description
        return mask

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Type and shape as they are; all else is computed with the entries."""
        kwargs = kwargs or {}
        if function in LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        mask = args[0] if args else None
        if isinstance(mask, Mask):
            if function is Tensor.__getitem__ and (description := _sliced(mask.description, args[1])):
                return mask if description is mask.description else Mask.of(description)
            if function in SAME and _is_unchanged(mask.description, args[1:], kwargs):
                return mask
        with torch._C.DisableTorchFunctionSubclass():
            return function(*_entries(args), **{name: _entries(value) for name, value in kwargs.items()})


def _entries(value: Any) -> Any:
    """`value` with the entries of the masks in it."""
    if isinstance(value, Mask):
        return value.description.dense()
    return type(value)(map(_entries, value)) if type(value) in (list, tuple) else value


def _sliced(description: Description, index: Any) -> Description | None:
    """The description of what an index picks, where that is all or the first keys; else None."""
    whole = (slice(None), Ellipsis)
    if not isinstance(index, tuple) or not all(isinstance(part, slice | type(Ellipsis)) for part in index):
        return None
    *before, last = index
    if any(part not in whole for part in before) or not isinstance(last, slice):
        return None
    if len(index) != 4 and Ellipsis not in before:
        return None
    start, stop, step = last.indices(description.kv_length)
    return description.cropped(stop) if (start, step) == (0, 1) and stop > 0 else None


def _is_unchanged(description: Description, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether a conversion to these types and devices leaves a mask as it is."""
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
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """A mask as `AttentionMaskInterface` asks for one: a `Mask`, or its entries where a graph is traced.

    Args:
        batch_size, q_length, kv_length: B, Tq, Tk.
        q_offset, kv_offset: the numbers of the first query's and the first key's token.
        mask_function: who sees whom, by those numbers.
        attention_mask: [B, tokens], False at padding.
        use_vmap: whether `mask_function` takes scalars alone.
        device: where the call is computed.
    """
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if not traced:
        q_offset = int(q_offset)  # a static cache counts in a tensor
    description = Description(
        batch_size,
        q_length,
        kv_length,
        q_offset,  # type: ignore[arg-type]
        kv_offset,
        mask_function,
        attention_mask,
        use_vmap,
        torch.device(device),
    )
    return description.dense() if traced else Mask.of(description)
