"""The arguments of `Transformer.forward` except the text, and the checks of all its tensors.

Shapes and types are always checked; values only where the host knows them (`core.host_values`).
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.host_values import bounds, check_range, host_values, next_labels
from polyformer.core.sequence.context import SequenceShard
from polyformer.core.sequence.tokens import ModelInputs, Tokens, expected_ids
from polyformer.models.outputs import ModelState, TrajectoryState
from polyformer.nn.heads import Head, HeadInput
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


def check_ids(name: str, ids: object) -> None:
    """Raise `InputError` unless `ids` are integers [B, T]."""
    if not isinstance(ids, Tensor):
        raise expected_ids(name, ids)
    if ids.dim() != 2 or ids.dtype not in INTEGERS:
        raise InputError(f"{name}: expected integer ids [batch, length], got {ids.dtype} {tuple(ids.shape)}")


def check_vocabulary(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise `InputError` for ids outside the vocabulary, if the host knows the values."""
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


Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderInputs:
    """The inputs of the decoder of an encoder-decoder.

    Args:
        decoder_input_ids, decoder_attention_mask: [B, U], the target so far. The default is `labels` shifted
            right by one token, or the shifted source for a head that predicts no tokens.
        decoder_relation_ids: as relation_ids, for the target.
        decoder_inputs_embeds: as inputs_embeds, instead of decoder_input_ids.
    """

    decoder_input_ids: Tensor | None = None
    decoder_attention_mask: Tensor | None = None
    decoder_relation_ids: Tensor | None = None
    decoder_inputs_embeds: Tensor | None = None

    def as_inputs(self) -> ModelInputs:
        """Return the same values as the inputs of a stack."""
        return ModelInputs(
            self.decoder_input_ids,
            self.decoder_attention_mask,
            relation_ids=self.decoder_relation_ids,
            inputs_embeds=self.decoder_inputs_embeds,
        ).with_placeholder_ids("decoder_inputs_embeds")

    def check_absent(self, model: str, source_spans: Tensor | None) -> None:
        """Raise `InputError` for the first given argument, as `model` has no source and target."""
        refuse(
            model,
            decoder_input_ids=self.decoder_input_ids,
            decoder_attention_mask=self.decoder_attention_mask,
            decoder_relation_ids=self.decoder_relation_ids,
            decoder_inputs_embeds=self.decoder_inputs_embeds,
            source_spans=source_spans,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Labels:
    """The labels and the other inputs that the head reads in addition to the hidden states.

    `choices`: the number of rows of the text for each question, from the shape of the input ids.

    Args:
        labels: the values to predict, -100 for tokens without a prediction. For a model with only a decoder
            they are the input_ids: the model shifts them by one token, and predicts nothing across documents.
        shift_labels: [B, T], instead of a decoder's labels: the token that each token should predict.
        sentence_labels: [B], the class of the whole text, or for texts [B, C, T] the index of the text that
            answers the question, for heads that also predict it.
        neighbour_ids: [B, T, k], for the head 'semiparametric': the tokens that followed the k contexts in a
            datastore that are nearest to the context of each token (for an encoder-decoder of each target
            token), -1 for none.
        score_positions: [B, C], for heads of multiple choice: the token from which the score of each text is
            computed, instead of the token that the head pools.
    """

    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    sentence_labels: Tensor | None = None
    neighbour_ids: Tensor | None = None
    score_positions: Tensor | None = None
    choices: int | None = None

    @classmethod
    def of(
        cls,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        sentence_labels: Tensor | None,
        neighbour_ids: Tensor | None,
        score_positions: Tensor | None,
    ) -> "Labels":
        """Return the labels of a call; `NO_LABELS` if there are none."""
        if labels is shift_labels is sentence_labels is neighbour_ids is score_positions is None:
            return NO_LABELS
        return cls(labels, shift_labels, sentence_labels, neighbour_ids, score_positions)

    def check(self, head: Head, has_encoder: bool) -> None:
        """Raise `InputError` for labels that `head` does not take."""
        if self.sentence_labels is not None and not head.predicts_sentence:
            raise InputError(
                "sentence_labels: this model's head predicts no class of the whole text; leave "
                "them out, or use the head 'pretraining'"
            )
        if self.neighbour_ids is not None and not head.reads_neighbours:
            raise InputError("neighbour_ids: this model's head takes none; use the head 'semiparametric'")
        if self.score_positions is not None and not head.reads_choices:
            raise InputError("score_positions: only heads of multiple choice take them; leave them out")
        check_labels(self.labels, self.sentence_labels, head.predicts_next)
        if self.shift_labels is None:
            return
        if self.labels is not None or has_encoder or not head.predicts_next:
            raise InputError(
                "shift_labels: only a decoder's language-model head takes them, and instead of labels; "
                "pass only labels"
            )

    def flatten_choices(self, head: Head, inputs: ModelInputs) -> "tuple[ModelInputs, Labels]":
        """Return inputs and labels for the head. Texts [B, C, T] of multiple choice become rows [B C, T] with
        `choices` C; so do their labels if the head predicts the next tokens."""
        ids = inputs.input_ids
        if not isinstance(ids, Tensor) or ids.dim() != 3:
            return inputs, self
        inputs, choices = inputs.with_choices_as_rows()
        # Sentence labels stay [B], an answer per question.
        labels = dataclasses.replace(self, choices=choices)
        if head.predicts_next:
            for name in ("labels", "shift_labels"):
                value = getattr(self, name)
                if isinstance(value, Tensor) and value.dim() == 3:
                    labels = dataclasses.replace(labels, **{name: value.flatten(0, 1)})
        return inputs, labels

    def shifted(self, head: Head, document_ids: Tensor | None, tokens: Tokens, vocab_size: int) -> "Labels":
        """Return the labels, shifted so that each of a decoder's `tokens` predicts the next token.

        Raises `InputError` for labels out of range, even if the shift leaves them out.
        """
        if self.shift_labels is not None:
            return dataclasses.replace(self, labels=self.shift_labels)
        if self.labels is None or not head.predicts_next:
            return self
        check_range(self.labels, vocab_size)
        # The last token of a document predicts nothing, as the next token belongs to another document.
        following = next_labels(self.labels, document_ids, tokens.new_valid(self.labels.shape[1]))
        return dataclasses.replace(self, labels=following)

    def local_part(self, shard: SequenceShard | None) -> "Labels":
        """Return the (already shifted) `labels` of a process's tokens; all if `shard` is None."""
        if shard is None:
            return self
        # Labels are shifted before the sequence is cut: the next token may be on another rank.
        return Labels(None if self.labels is None else shard.take(self.labels))

    def add_to(self, inputs: HeadInput, vocab_size: int) -> HeadInput:
        """Return `inputs` of the head with all fields of this class except `labels`; raises `InputError` for
        values that do not fit the inputs."""
        check_neighbours(self.neighbour_ids, inputs.hidden.shape[:2], vocab_size)
        check_score_positions(self.score_positions, inputs, self.choices)
        positions = self.score_positions
        return dataclasses.replace(
            inputs,
            sentence_labels=self.sentence_labels,
            neighbour_ids=self.neighbour_ids,
            choices=self.choices,
            score_positions=None if positions is None else positions.flatten(),
        )


NO_LABELS = Labels()


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """The optional outputs of a model.

    Args:
        output_attentions: return the attention weights (and run attention densely).
        output_hidden_states: return every layer's input and the final output.
    """

    output_attentions: bool = False
    output_hidden_states: bool = False


NO_EXTRA_OUTPUTS = OutputOptions()


def documented_by(*groups: type) -> Callable[[Function], Function]:
    """Insert the descriptions of a class's fields into a function's docstring, where it names the class in
    braces, as {ModelInputs}. Arguments that several functions take are thus described once, and `help` shows
    them."""

    def document(function: Function) -> Function:
        for group in groups:
            if function.__doc__:  # Python's option -OO removes docstrings
                name = f"{{{group.__name__}}}"
                indent = function.__doc__.partition(name)[0].rpartition("\n")[2]
                # The fields are described once, in their class.
                _, _, fields = inspect.cleandoc(group.__doc__ or "").partition("Args:\n")
                fields = textwrap.indent(textwrap.dedent(fields), indent).strip()
                function.__doc__ = function.__doc__.replace(name, fields)
        return function

    return document
