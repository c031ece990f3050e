"""Sequences packed into one row, given by the ends in flash attention's argument `cu_seq_lens_q`."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.context import Context
from polyformer.models.attached.mask import positions_in_documents


def with_packed_sequences(context: Context, options: dict[str, Any], rows: int) -> Context:
    """Return the context with the sequences in `options`, unless it already has sequences.

    The numbers count the tokens of all `rows` of the batch in turn. Tokens after the last end form another
    sequence. As in transformers, a padding mask takes precedence. Cross-attention and calls after a cache
    have other keys, and remain unchanged.

    Raises:
        InputError: numbers that do not begin at 0, that fall or exceed the tokens, or a sequence in two rows.
    """
    ends = options.get("cu_seq_lens_q")
    length = context.q_len
    if ends is None or context.q_doc is not None or context.num_rows > 1 or context.kv_valid is not None:
        return context
    if length != context.kv_len or isinstance(context.offset, Tensor) or context.offset:
        return context
    if not torch.compiler.is_compiling():
        _check(ends, options.get("cu_seq_lens_k"), rows, length)
    slots = torch.arange(rows * length, device=ends.device)
    documents = torch.searchsorted(ends[1:].to(slots.dtype), slots, right=True).view(rows, length)
    if not torch.compiler.is_compiling() and bool((documents == documents[:, :1]).all()):
        return context
    at = positions_in_documents(documents)
    return dataclasses.replace(context, memo={}, q_doc=documents, kv_doc=documents, q_pos=at, kv_pos=at)


def _check(ends: Any, keys: Any, rows: int, length: int) -> None:
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
