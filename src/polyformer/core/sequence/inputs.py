"""The inputs of a model: the token ids of a text and optional data per token."""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.errors import InputError, quote
from polyformer.core.sequence.sequence_shards import SequenceShard


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInputs:
    """A text, or the source of an encoder-decoder; a field is None if it is not given.

    Args:
        input_ids: [B, T], the text; the source of an encoder-decoder.
        attention_mask: [B, T], 1 for non-padding tokens and 0 for padding, on either side.
        position_ids: [B, T], [1, T] or [T]; by default non-padding tokens are counted from 0 in every
            document.
        document_ids: [B, T], not decreasing: documents packed in one row do not attend to one another.
        token_type_ids, langs: [B, T] or [1, T], if the model has token types or languages.
        segment_ids: [B, T], the sentence (or other part) of each token, for structured patterns and
            positions; for the source of an encoder-decoder.
        global_attention_mask: [B, T], 1 for tokens that the pattern `Marked()` makes global; with a state
            for the new tokens; for the source of an encoder-decoder.
        relation_ids: [B, T, T], a label of the relation of each token (axis 1) to each token (axis 2), -1 for
            none, if the position scheme embeds them; with a state [B, T, all tokens so far].
        inputs_embeds: [B, T, E], token vectors instead of the ids, as wide as the token table.
        source_spans: [B, U, 2], the first and the last source position, counted without padding, that each
            position of the target may read, for the pattern `SourceSpans()` of an encoder-decoder; given with
            the source for the whole target; its later positions have the last span.
    """

    input_ids: Tensor | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    langs: Tensor | None = None
    segment_ids: Tensor | None = None
    global_attention_mask: Tensor | None = None
    relation_ids: Tensor | None = None
    inputs_embeds: Tensor | None = None
    source_spans: Tensor | None = None

    def with_placeholder_ids(self, name: str = "inputs_embeds", choices: bool = False) -> "ModelInputs":
        """Return these inputs with zeros as ids if the caller gave token vectors as `name` instead.

        The vectors may be [B, C, T, E] if there may be `choices`.
        """
        vectors = self.inputs_embeds
        if vectors is None:
            return self
        if self.input_ids is not None or vectors.dim() not in ((3, 4) if choices else (3,)):
            other = "ids too" if self.input_ids is not None else tuple(vectors.shape)
            raise InputError(f"{name}: expected [batch, length, width] in place of the ids, got {other}")
        return dataclasses.replace(self, input_ids=vectors.new_zeros(vectors.shape[:-1], dtype=torch.long))

    def with_all_rows(self) -> "ModelInputs":
        """Return these inputs with every [1, T] row of numbers expanded to the ids [B, T]."""
        ids, rows = self.input_ids, {}
        if not isinstance(ids, Tensor):
            return self
        for name in ("position_ids", "token_type_ids", "langs"):
            numbers = getattr(self, name)
            if isinstance(numbers, Tensor) and numbers.shape == (1, *ids.shape[1:]):
                rows[name] = numbers.expand_as(ids)
        return dataclasses.replace(self, **rows) if rows else self

    def local_part(self, shard: SequenceShard) -> "ModelInputs":
        """Return the tokens of one process, without `relation_ids`, which are per pair."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if value is not None:
                fields[name] = shard.take(value, 1 if name == "inputs_embeds" else -1)
        return ModelInputs(**{**fields, "relation_ids": None})

    def with_choices_as_rows(self) -> "tuple[ModelInputs, int]":
        """Return the texts [B, C, T] of C choices per question as rows [B C, T], and C."""
        ids = self.input_ids
        assert ids is not None
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if value is not None and value.shape[:2] == ids.shape[:2]:
                fields[name] = value.flatten(0, 1)
        return ModelInputs(**fields), ids.shape[1]

    @property
    def is_plain(self) -> bool:
        """Whether the tokens are real, counted from 0, and of one document and segment without marks."""
        tables = self.attention_mask is self.position_ids is self.document_ids is self.segment_ids is None
        return tables and self.global_attention_mask is None

    @property
    def text_ids(self) -> Tensor | None:
        """The ids [B, T]; None if they are only placeholders for token vectors."""
        return self.input_ids if self.inputs_embeds is None else None


def expected_ids(name: str, value: object) -> InputError:
    """Return the error for an argument that is not a tensor of token ids."""
    way_out = ""
    if isinstance(value, str | list | tuple):
        way_out = "; a tokenizer makes ids of a text: torch.tensor([tokenizer.encode(text)])"
    return InputError(f"{name}: expected token ids [batch, length], got {quote(value)}{way_out}")
