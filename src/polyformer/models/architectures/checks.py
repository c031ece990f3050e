"""Checks of the tensors that a caller passes to a model: shapes, types, and values of masks and ids.

Shapes and types are always checked; values only where the host knows them (`core.host_values`).
"""

from typing import Any

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import bounds, host_values
from polyformer.core.sequence.inputs import ModelInputs, expected_ids
from polyformer.models.outputs import ModelState, TrajectoryState
from polyformer.nn.heads import HeadInput
from polyformer.nn.stack import Stack

# The inputs that give the number of the document, segment, type or language of each token.
NUMBERS = "document_ids", "segment_ids", "token_type_ids", "langs"

# The types of indices into a table.
INTEGERS = (torch.int64, torch.int32)


def check_labels(labels: object, sentence_labels: object, tokens: bool) -> None:
    """Raise `InputError` for labels that are not tensors and, if `tokens`, that are not integers [B, T]."""
    for name, value in (("labels", labels), ("sentence_labels", sentence_labels)):
        if value is not None and not isinstance(value, Tensor):
            raise InputError(f"{name}: expected a tensor, got {type(value).__name__} {quote(value)}")
    if tokens and isinstance(labels, Tensor) and (labels.dim() != 2 or labels.dtype not in INTEGERS):
        raise InputError(
            f"labels: expected integer ids [batch, length], got {labels.dtype} {tuple(labels.shape)}"
        )


def check_ids(name: str, ids: object, vocab_size: int) -> None:
    """Raise `InputError` unless `ids` are integers [B, T] and, if values are checked, in the vocabulary."""
    if not isinstance(ids, Tensor):
        raise expected_ids(name, ids)
    if ids.dim() != 2 or ids.dtype not in INTEGERS:
        raise InputError(f"{name}: expected integer ids [batch, length], got {ids.dtype} {tuple(ids.shape)}")
    if (known := bounds(ids)) is not None:
        low, high = known
        if low < 0 or high >= vocab_size:
            raise InputError(f"{name}: expected ids from 0 to {vocab_size - 1}, got {low} to {high}")


def check_inputs(inputs: ModelInputs, past: int, prefix: str = "", rows_before: int = 0) -> None:
    """Raise `InputError` unless `inputs`, which follow `past` earlier tokens, have valid shapes and values.

    `prefix` is "decoder_" for the target of an encoder-decoder. Padding may have the positions of the
    `rows_before` rows of a position table that come before position 0: -1 is the last of them.
    """
    assert inputs.input_ids is not None
    rows, new = inputs.input_ids.shape
    mask, positions = inputs.attention_mask, inputs.position_ids
    if mask is not None:
        check_mask(f"{prefix}attention_mask", mask, (rows, new), (rows, past + new))
    if inputs.global_attention_mask is not None:
        check_mask(f"{prefix}global_attention_mask", inputs.global_attention_mask, (rows, new))
    if positions is not None:
        if rows_before and mask is not None and mask.shape == positions.shape:
            # Such positions of padding are valid, so the check below skips them.
            positions = torch.where((mask == 0) & (positions >= -rows_before), 0, positions)
        _check_numbers(f"{prefix}position_ids", positions, (rows, new), (new,), least=0)
    for name in NUMBERS:
        if (numbers := getattr(inputs, name)) is not None:
            # Packing rows without padding renumbers documents, which must not be negative.
            _check_numbers(prefix + name, numbers, (rows, new), least=0 if name == "document_ids" else None)


def check_state(state: object, kind: type[ModelState | TrajectoryState], stack: Stack, rows: int) -> None:
    """Raise `InputError` unless `state` is from a model with the parts of `stack`, for `rows` rows."""
    if not isinstance(state, kind):
        raise InputError(f"state: expected the state of an earlier output, got {quote(state)}")
    differences = [pair for pair in zip(stack.owner, state.owner or stack.owner) if pair[0] != pair[1]]
    if len(state.layers) not in (0, len(stack.groups)):  # without layers: a source alone
        differences.append((f"{len(stack.groups)} layers", f"{len(state.layers)} layers"))
    if differences:
        own, other = map(quote, differences[0])
        raise InputError(
            f"state: expected a state of a model with {own}, got one of a model with {other}; pass the state "
            "of an earlier output of this model"
        )
    if state.rows not in (None, rows):
        raise InputError(
            f"state: expected {rows} rows, as the ids have, got a state of {state.rows}; select its rows by "
            "state.reorder(index), or pass ids for all of them"
        )


def check_same_source(ids: Tensor | None, state: object) -> None:
    """Raise `InputError` if `ids` [B, S] are not the source that `state` has read."""
    read = state.source_ids if isinstance(state, ModelState) else None  # others are refused with the target
    if ids is None or read is None or ids is read:
        return
    values, before = host_values(ids), host_values(read)
    same = ids.shape == read.shape
    if same and values is not None and before is not None:
        same = torch.equal(values, before)
    if not same:
        raise InputError(
            f"input_ids: expected the source that the state has read {tuple(read.shape)}, got another "
            f"{tuple(ids.shape)}; leave out the ids, or the state"
        )


def check_source_spans(spans: object, rows: int) -> None:
    """Raise `InputError` unless spans are None or integers [rows, target length, 2]."""
    if spans is None:
        return
    shape = tuple(spans.shape) if isinstance(spans, Tensor) else quote(spans)
    if not (
        isinstance(spans, Tensor) and spans.dim() == 3 and spans.shape[0] == rows and spans.shape[2] == 2
    ):
        raise InputError(f"source_spans: expected the shape [{rows}, target length, 2], got {shape}")
    if spans.is_floating_point() or not spans.shape[1]:
        raise InputError(
            f"source_spans: expected integers for 1 target position or more, got {spans.dtype} {shape}"
        )


def check_neighbours(near: object, tokens: torch.Size, vocab_size: int) -> None:
    """Raise `InputError` unless `near` is None, or contains ids or -1 for each of the `tokens` [B, T]."""
    if near is None:
        return
    if not isinstance(near, Tensor) or near.dim() != 3:
        shape = tuple(near.shape) if isinstance(near, Tensor) else quote(near)
        raise InputError(f"neighbour_ids: expected [batch, length, neighbours], got {shape}")
    _check_numbers("neighbour_ids", near, (*tokens, near.shape[2]), least=-1)
    values = _readable(near)
    if values is not None and int(values.max()) >= vocab_size:
        raise InputError(
            f"neighbour_ids: expected ids below {vocab_size}, or -1 for none, got {int(values.max())}"
        )


def check_score_positions(positions: object, inputs: HeadInput, choices: int | None) -> None:
    """Raise `InputError` unless `positions` is None, or is a real token of each of the texts in `inputs`."""
    if positions is None:
        return
    rows, length = inputs.hidden.shape[:2]
    # With choices the texts of a question are successive rows.
    shapes = [(1, rows), (rows,)] if choices is None else [(rows // choices, choices)]
    values = _readable(_check_numbers("score_positions", positions, *shapes, least=0))
    if values is None:
        return
    if int(values.max()) >= length:
        raise InputError(f"score_positions: expected 0 to {length - 1}, got {int(values.max())}")
    mask = None if inputs.mask is None else _readable(inputs.mask)
    if mask is not None:
        # Texts that are all padding have no real token to score.
        real = mask[torch.arange(rows), values.flatten()] | ~mask.any(1)
        if not bool(real.all()):
            place = int(values.flatten()[~real][0])
            raise InputError(f"score_positions: expected a token of each text, got {place}, which is padding")


def refuse(model: str, **arguments: Any) -> None:
    """Raise `InputError` for the first of the `arguments` that is not None: `model` does not take it."""
    for name, value in arguments.items():
        if value is not None:
            raise InputError(f"{name}: {model} does not take it; leave it out")


def check_mask(name: str, mask: object, *shapes: tuple[int, ...]) -> None:
    """Raise `InputError` unless `mask` has one of the `shapes` and, if checked, only ones and zeros."""
    values = _readable(_check_shape(name, mask, shapes))
    if values is None or values.dtype == torch.bool:
        return
    strange = (values != 0) & (values != 1)
    if bool(strange.any()):
        value = values[strange].flatten()[0].item()
        raise InputError(
            f"{name}: expected 1 for tokens that count and 0 for others, got {value}; a mask to be added to "
            "the scores, or of weights, is not read"
        )


def _check_numbers(name: str, numbers: object, *shapes: tuple[int, ...], least: int | None) -> Tensor:
    numbers = _check_shape(name, numbers, shapes)
    if numbers.dtype not in INTEGERS:
        raise InputError(f"{name}: expected integers of 32 or 64 bits, got {numbers.dtype}")
    if least is not None and (values := _readable(numbers)) is not None and int(values.min()) < least:
        raise InputError(f"{name}: expected {least} or more, got {int(values.min())}")
    return numbers


def _check_shape(name: str, tensor: object, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name}: expected a tensor, got {type(tensor).__name__} {quote(tensor)}")
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise InputError(f"{name}: expected the shape {expected}, got {tuple(tensor.shape)}")
    return tensor


def _readable(tensor: Tensor) -> Tensor | None:
    """Return `host_values` of a tensor; None if they are not known, or if there are none."""
    values = host_values(tensor)
    return values if values is not None and values.numel() else None
