"""The embedding sum below a stack: tokens, positions, token types, then a norm where the family has one."""

import dataclasses
import math

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.norms import NormConfig
from polyformer.position import Position


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(Config):
    """What is added up below the first layer."""

    scaled: bool = False  # token vectors times sqrt(hidden_size), Vaswani et al. 2017, section 3.4
    normed: bool = False  # a norm after the sum, as in BERT
    type_vocab_size: int = 0  # token types (BERT's segments); 0 for none
    shared: bool = True  # one token table for encoder and decoder
    tied: bool = True  # the output layer reads the token table too


class Embedding(nn.Module):
    """Token vectors [B, T, E] to the input of the first layer [B, T, E]."""

    def __init__(self, config: EmbeddingConfig, hidden_size: int, norm: NormConfig, dropout: float):
        super().__init__()
        self.factor = math.sqrt(hidden_size) if config.scaled else 1.0
        self.types = nn.Embedding(config.type_vocab_size, hidden_size) if config.type_vocab_size else None
        self.norm = norm.build(hidden_size) if config.normed else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tokens: Tensor, position: Position, pos: Tensor, token_type_ids: Tensor | None
    ) -> Tensor:
        """The sum; token types default to 0. `InputError` where the model has none but some are given."""
        x = tokens * self.factor if self.factor != 1.0 else tokens
        if self.types is not None:
            types = torch.zeros_like(pos) if token_type_ids is None else self._checked(token_type_ids)
            x = x + self.types(types)
        elif token_type_ids is not None:
            raise InputError(
                "token_type_ids: this model has none (embedding.type_vocab_size is 0); leave them out"
            )
        return self.dropout(self.norm(position.embed(x, pos, 0)))

    def _checked(self, types: Tensor) -> Tensor:
        assert self.types is not None
        if types.device.type == "cpu" and not torch.compiler.is_compiling() and types.numel():
            low, high = (int(one) for one in types.aminmax())
            if low < 0 or high >= self.types.num_embeddings:
                most = self.types.num_embeddings - 1
                raise InputError(f"token_type_ids: expected numbers from 0 to {most}, got {low} to {high}")
        return types
