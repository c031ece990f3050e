"""A text or a translation read a token at a time, each call with the state that the one before left."""

import torch
from torch import Tensor

from polyformer.models.architectures import Transformer


def stepwise(of: Transformer, tokens: Tensor, source: Tensor | None = None) -> Tensor:
    """The last hidden states [B, T, E] of tokens [B, T], of a decoder alone or behind a `source`."""
    state = of.new_state() if source is None else of.encode(source)
    name, steps = "input_ids" if source is None else "decoder_input_ids", []
    for t in range(tokens.shape[1]):
        output = of(**{name: tokens[:, t : t + 1]}, state=state)
        state = output.state
        steps.append(output.last_hidden_state)
    return torch.cat(steps, 1)
