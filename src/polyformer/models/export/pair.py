"""An encoder-decoder that reads a whole source and a whole target as a function of tensors."""

from typing import Any

import torch
from torch import Tensor, nn

from polyformer.models.architectures import Transformer


class PairGraph(nn.Module):
    """An encoder-decoder without a cache for `torch.export`.

    inputs: token ids and an attention mask [B, S] of the source, and token ids [B, U] of the target without
    padding before it; a head that does not predict tokens reads the source as target. outputs: the
    predictions of the head, and the last hidden states of the decoder.
    """

    def __init__(self, model: Transformer):
        super().__init__()
        assert model.encoder is not None
        assert model.decoder is not None
        self.model = model
        target = ["decoder_input_ids"] if model.head.predicts_next else []
        self.inputs = "input_ids", "attention_mask", *target
        self.outputs = "logits", "last_hidden_state"
        own = [f"{layer}" for layer in range(len(model.decoder.sequence))]
        encoder = [f"{layer} (encoder)" for layer in range(len(model.encoder.sequence))]
        self.layers = *encoder, *(name for layer in own for name in (layer, f"{layer} (of the source)"))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the predictions and the last hidden states."""
        output = self.model(input_ids, attention_mask, decoder_input_ids=decoder_input_ids)
        return output.logits, output.last_hidden_state

    def example(self, longest: int) -> tuple[Tensor, ...]:
        """Return inputs of two rows, with more tokens than a block of attention if possible."""
        device = next(self.model.parameters()).device
        lengths = min(301, longest), min(301, longest), min(300, longest)
        return tuple(torch.ones(2, length, dtype=torch.long, device=device) for length in lengths)[
            : len(self.inputs)
        ]

    def axes(self) -> dict[str, Any]:
        """Return the names of the axes that have any size, by argument of `forward`."""
        names = {"input_ids": "source", "attention_mask": "source", "decoder_input_ids": "length"}
        return {name: {0: "batch", 1: names[name]} for name in self.inputs}
