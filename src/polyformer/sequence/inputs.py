"""What a model reads: the ids of a text, and what may be said of each token."""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.sequence.shares import Share


@dataclasses.dataclass(frozen=True, eq=False)
class ModelInputs:
    """A text, or the source of an encoder-decoder; None where nothing is said.

    Args:
        input_ids: [B, T], the text; of an encoder-decoder the source.
        attention_mask: [B, T], 1 for real tokens and 0 for padding, on either side.
        position_ids: [B, T] or [T]; by default real tokens are counted from 0 in every document.
        document_ids: [B, T], not decreasing: documents packed in one row do not attend to one another.
        token_type_ids, langs: [B, T], where the model has token types or languages.
        segment_ids: [B, T], the sentence (or other part) that each token belongs to, for patterns and
            positions that read a structure; of an encoder-decoder in the source.
        global_attention_mask: [B, T], 1 for tokens that the pattern `Marked()` makes global; with a state
            for the new tokens, of an encoder-decoder for the source.
        relation_ids: [B, T, T], a label of what each token (axis 1) is to each (axis 2), -1 for nothing,
            where the position scheme embeds them; with a state [B, T, all tokens so far].
        inputs_embeds: [B, T, E], token vectors in place of the ids, as wide as the token table.
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

    def with_placeholder_ids(self, name: str = "inputs_embeds", choices: bool = False) -> "ModelInputs":
        """With zeros for ids where token vectors stand in their place, which the caller gave as `name`;
        [B, C, T, E] too where there may be `choices`."""
        vectors = self.inputs_embeds
        if vectors is None:
            return self
        if self.input_ids is not None or vectors.dim() not in ((3, 4) if choices else (3,)):
            other = "ids too" if self.input_ids is not None else tuple(vectors.shape)
            raise InputError(f"{name}: expected [batch, length, width] in place of the ids, got {other}")
        return dataclasses.replace(self, input_ids=vectors.new_zeros(vectors.shape[:-1], dtype=torch.long))

    def of_share(self, share: Share) -> "ModelInputs":
        """The tokens of one process, without `relation_ids`, which are of pairs."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if value is not None:
                fields[name] = share.take(value, 1 if name == "inputs_embeds" else -1)
        return ModelInputs(**{**fields, "relation_ids": None})

    def with_choices_as_rows(self) -> "tuple[ModelInputs, int]":
        """The texts [B, C, T] of C choices of B questions as rows [B C, T], and C."""
        ids = self.input_ids
        assert ids is not None
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in fields.items():
            if value is not None and value.shape[:2] == ids.shape[:2]:
                fields[name] = value.flatten(0, 1)
        return ModelInputs(**fields), ids.shape[1]

    @property
    def text_ids(self) -> Tensor | None:
        """The ids [B, T]; None where they only stand in for token vectors."""
        return self.input_ids if self.inputs_embeds is None else None
