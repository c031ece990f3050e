"""Texts that a model of transformers reads, as readings."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.cli.plots.explorer.reading import Reading, shown
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class TransformersTexts:
    """A reader of texts with a `model` of transformers; without its `tokenizer` tokens are shown as ids."""

    name: str
    model: Any
    tokenizer: Any = None

    def of_text(self, text: str, target: str | None = None) -> Reading:
        """Return the reading of `text`; target: the decoder's input of an encoder-decoder, else `text`."""
        if self.tokenizer is None:
            raise InputError("tokenizer: a text requires a tokenizer; pass tokenizer=...")
        inputs = dict(self.tokenizer(text, return_tensors="pt", return_attention_mask=False))
        goal = self.tokenizer(target, return_tensors="pt").input_ids if target is not None else None
        return self._reading(inputs, goal)

    def of_ids(self, ids: Sequence[int], target: Sequence[int] | None = None) -> Reading:
        """Return the reading of token ids."""
        goal = None if target is None else torch.tensor([[*target]])
        return self._reading({"input_ids": torch.tensor([[*ids]])}, goal)

    def _reading(self, inputs: dict[str, Tensor], target: Tensor | None) -> Reading:
        ids = inputs["input_ids"]
        rows = {"encoder": ids, "decoder": ids}
        if self.model.config.is_encoder_decoder:
            rows["decoder"] = inputs["decoder_input_ids"] = ids if target is None else target
        elif target is not None:
            raise InputError("target: only for encoder-decoder models; leave it out")
        device = next(self.model.parameters()).device
        inputs = {name: value.to(device) for name, value in inputs.items()}
        return Reading(name=self.name, model=self.model, inputs=inputs, tokens=shown(rows, self._token))

    def _token(self, number: int) -> str:
        return f"[{number}]" if self.tokenizer is None else self.tokenizer.decode([number])
