"""A model that reads whole texts as a function of tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from polyformer.models.architectures import Transformer


class TextGraph(nn.Module):
    """An encoder, or a decoder without a cache, for `torch.export`.

    inputs: token ids and an attention mask [B, T], and token types [B, T] if the model has several. outputs:
    the predictions of the head, and the last hidden states [B, T, E].
    """

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model
        stack = model.encoder or model.decoder
        assert stack is not None
        self.layers = tuple(map(str, range(len(stack.sequence))))
        types = ["token_type_ids"] if model.config.embedding.type_vocab_size > 1 else []
        self.inputs = "input_ids", "attention_mask", *types
        predictions = ["logits", "sentence_logits"] if model.head.predicts_sentence else ["logits"]
        self.outputs = *predictions, "last_hidden_state"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the predictions and the last hidden states."""
        output = self.model(input_ids, attention_mask, token_type_ids=token_type_ids)
        predictions = output.predictions()
        every = predictions if isinstance(predictions, tuple) else (predictions,)
        return *every, output.last_hidden_state

    def example(self, longest: int) -> tuple[Tensor, ...]:
        """Return inputs of two rows, with more tokens than a block of attention if possible."""
        shape, device = (2, min(301, longest)), next(self.model.parameters()).device
        return tuple(torch.ones(shape, dtype=torch.long, device=device) for _ in self.inputs)

    def axes(self) -> dict[str, Any]:
        """Return the names of the axes that have any size, by argument of `forward`."""
        return {name: {0: "batch", 1: "length"} for name in self.inputs}
