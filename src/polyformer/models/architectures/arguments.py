"""The arguments of `Transformer.forward` except the text, in the groups that the model passes on."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.host_values import check_range, next_labels
from polyformer.core.sequence.inputs import ModelInputs
from polyformer.core.sequence.sequence_shards import SequenceShard
from polyformer.core.sequence.tokens import Tokens
from polyformer.models.architectures.checks import (
    check_labels,
    check_neighbours,
    check_score_positions,
    refuse,
)
from polyformer.nn.heads import Head, HeadInput

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
