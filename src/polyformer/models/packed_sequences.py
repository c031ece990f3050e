"""Sequences packed into the rows of a batch, from the cumulative lengths of flash attention."""

from typing import Any

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote


def packed_sequences(ends: Any, keys: Any, rows: int, length: int) -> Tensor:
    """Return the number of each token's sequence, [rows, length].

    `ends` and `keys` are flash attention's `cu_seq_lens_q` and `cu_seq_lens_k` (None: the same), [0, n1,
    n1 + n2, ...], which count the tokens of all rows of the batch in turn. Tokens after the last end form
    another sequence.

    Raises:
        InputError: numbers that do not begin at 0, that fall or exceed the tokens, a sequence in two rows, or
            other numbers for keys. Compiled code does not check them.
    """
    if not torch.compiler.is_compiling():
        _check_ends(ends, keys, rows, length)
    slots = torch.arange(rows * length, device=ends.device)
    return torch.searchsorted(ends[1:].to(slots.dtype), slots, right=True).view(rows, length)


def _check_ends(ends: Any, keys: Any, rows: int, length: int) -> None:
    """Raise `InputError` unless `ends` divides the tokens of a batch, each row separately."""
    if not isinstance(ends, Tensor) or ends.dim() != 1 or ends.is_floating_point() or len(ends) < 2:
        raise InputError(f"cu_seq_lens_q: expected a tensor of integers [0, ..., tokens], got {quote(ends)}")
    numbers, tokens = ends.tolist(), rows * length
    if numbers[0] != 0 or numbers != sorted(numbers) or numbers[-1] > tokens:
        raise InputError(
            f"cu_seq_lens_q: expected numbers that begin at 0, do not fall and end by {tokens}, the tokens "
            f"of the batch, got {quote(numbers)}; "
            "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) makes them of lengths"
        )
    within = [row * length for row in range(1, rows) if row * length < numbers[-1]]
    if not set(within) <= set(numbers):
        raise InputError(
            f"cu_seq_lens_q: expected no sequence in two of the batch's {rows} rows of {length} tokens, "
            f"got {quote(numbers)}; pack the texts into one row"
        )
    if keys is not None and keys.tolist() != numbers:
        raise InputError(
            f"cu_seq_lens_k: expected the numbers of cu_seq_lens_q, {quote(numbers)}, "
            f"got {quote(keys.tolist())}; give both the same"
        )
