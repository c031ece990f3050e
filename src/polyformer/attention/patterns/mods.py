"""Mods written for FlexAttention and their meaning: a function of scalars, for every pair of tokens.

FlexAttention calls a mod with scalar indices under `torch.vmap`, so the mod may index (`bias[b][h]`), reduce
(`(pos[q_idx] - pos[kv_idx]).norm()`) and loop as if there were a single pair. The meaning is the same here,
for every backend. Mods that are proven elementwise run on indices that broadcast (`mod_program`), in a
fraction of the time; all others run under `torch.vmap`.

The mods of this library are written for indices that broadcast: [B, 1, 1, 1], [1, H, 1, 1], [Tq, 1] and [Tk],
or similar. `@broadcasts` marks them; for them q_idx counts the queries of the call instead of their slots.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyformer.attention.patterns.mod_cache import cached_program
from polyformer.attention.patterns.mod_program import (
    BranchError,
    MixedTypesError,
    Program,
    ScalarIndexing,
    program,
)
from polyformer.core.errors import InputError
from polyformer.core.ops.autograd import without_autocast

Function = TypeVar("Function", bound=Callable[..., Any])


def broadcasts(function: Function) -> Function:
    """Mark a mod that is written for indices that broadcast, and for the queries of one call."""
    function.broadcasts = True  # type: ignore[attr-defined]
    return function


def is_own(function: Callable[..., Any]) -> bool:
    """Return whether a mod takes indices that broadcast: it is marked with `broadcasts`, or is a `Mod`."""
    return isinstance(function, Mod) or getattr(function, "broadcasts", False)


@dataclasses.dataclass(frozen=True, eq=False)
class Mod:
    """A user's mod for indices that broadcast; scalar indices call the mod directly.

    name: "mask_mod" or "score_mod". start: added to q_idx. program: None if the mod requires `torch.vmap`.
    """

    function: Callable[..., Any]
    name: str
    program: Program | None
    start: int | Tensor = 0

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        name: str,
        score: torch.dtype | None,
        device: torch.device,
        start: int = 0,
    ) -> "Mod":
        """Return the mod, with its program if it has one; score: the type of the scores, None for a mask.

        Raises `InputError` for a mod that branches on its arguments or does not return a single value.
        """
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return cls(function, name, None, start)
        grad = torch.is_grad_enabled() and score is not None
        conditions = name, score, device, grad, torch.is_inference_mode_enabled(), torch.get_default_dtype()
        record = functools.partial(_record, function, name, score, device, grad)
        return cls(function, name, cached_program(function, conditions, record), start)

    def __call__(self, *places: Tensor) -> Tensor:
        """Return the values for `places`, (score,) b, h, q_idx, kv_idx, in a shape that broadcasts."""
        # `start` turns queries of the call into slots.
        places = (*places[:-2], places[-2] + self.start, places[-1])
        if all(x.dim() == 0 for x in places):
            value = self.function(*places)  # called by FlexAttention, under its vmap
        elif self.program is None or all(x.numel() == 1 for x in places):
            value = run_vmapped(self.function, *places)
        else:
            try:
                value = self.program(*places)
            except MixedTypesError:
                value = run_vmapped(self.function, *places)
        return value if self.name == "mask_mod" else value.to(places[0].dtype)


def _record(
    function: Callable[..., Any], name: str, score: torch.dtype | None, device: torch.device, grad: bool
) -> tuple[Program | None, bool]:
    """Run a mod on scalars; return its program, and whether the program is valid for later calls."""
    zero = torch.zeros((), dtype=torch.long, device=device)
    inputs = (zero,) * 4 if score is None else (zero.to(score), *(zero,) * 4)
    try:
        with torch.set_grad_enabled(grad), without_autocast(zero):
            traced, value, reusable = program(function, inputs)
    except BranchError:
        raise InputError(
            f"{name}: it reads the value of an index or a score (if, and, or, not, int(), .item()), "
            "but these represent all pairs of tokens at once; use torch.where, & | ~, or index a tensor"
        ) from None
    check_value(name, value)
    return traced, reusable


def check_value(name: str, value: Any) -> None:
    """Raise `InputError` unless `value` is a valid result of a mod for one pair."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name}: expected it to return a tensor, got {type(value).__name__}")
    if value.numel() != 1:
        raise InputError(
            f"{name}: expected one value for each pair of tokens, got shape {tuple(value.shape)}; "
            "its arguments are scalars, as in FlexAttention"
        )
    if name == "mask_mod" and value.dtype != torch.bool:
        raise InputError(f"mask_mod: expected it to return bool, got {value.dtype}; compare, or add .bool()")


def run_vmapped(function: Callable[..., Any], *places: Tensor) -> Tensor:
    """Return `function` of the scalars of each pair; the result broadcasts to `places`, which broadcast."""
    shape = torch.broadcast_shapes(*(x.shape for x in places))
    if 0 in shape:
        return places[0].new_zeros(shape, dtype=places[0].dtype if len(places) == 5 else torch.bool)
    # Leading axes of size 1 give all indices the same number of axes.
    aligned = [x.view(*[1] * (len(shape) - x.dim()), *x.shape) for x in places]
    call = function
    # A vmap per axis with several indices; the last one applied is the outermost and maps axis 0.
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            call = torch.vmap(call, in_dims=tuple(None if x.shape[axis] == 1 else 0 for x in aligned))
    scalars = [x.squeeze() for x in aligned]
    if len(places) == 5:
        scalars[0] = scalars[0].clone()  # a mod may write to its score
    with ScalarIndexing():
        value = call(*scalars)
    pairs = sum(size > 1 for size in shape)
    value = value[(..., *[0] * (value.dim() - pairs))]  # the value of a mod may have the shape [1]
    return value[tuple(slice(None) if size > 1 else None for size in shape)]
