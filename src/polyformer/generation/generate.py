"""`generate`: continue a text, or write the target of a source."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from polyformer.generation.config import GenerationConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Generated:
    """sequences: [B, T], prompt included for a decoder alone."""

    sequences: Tensor


@torch.no_grad()
def generate(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, config: GenerationConfig,
             streamer: Callable[[Tensor], None] | None = None) -> Generated:  # fmt: skip
    """Greedy continuation."""
    state, ids, mask = model.new_state(), input_ids, attention_mask
    sequences = input_ids
    for _ in range(config.max_new_tokens):
        out = model(ids, attention_mask=mask, state=state)
        ids, mask, state = out.logits[:, -1:].argmax(-1), None, out.state
        sequences = torch.cat([sequences, ids], 1)
    return Generated(sequences)
