"""The embedding sum before a stack: tokens, positions, token types and languages, and an optional norm.

A sum that is narrower than the stack, followed by a projection to E, keeps the token table small: Lan
et al. 2020 (ALBERT), section 3.1.

Token dropout, of encoders of proteins: masked tokens have the vector 0, as if dropped, and the others grow.

    x_t = 0 if token t is the mask, else e_t (1 - rate) n / (n - m)

for a document of n tokens, m of them masks. The vectors of a document then sum to about the same as in
training, in which a share `rate` of the tokens were masks. Rives et al. 2021 (ESM-1b), Lin et al. 2023
(ESM-2).
"""

import dataclasses
import math

import torch
from torch import Tensor, nn

from polyformer.attention.positions import Position
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.host_values import bounds
from polyformer.core.ops.layers import Dropout
from polyformer.core.ops.linear import Linear
from polyformer.core.ops.norms import NormConfig, normalize
from polyformer.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Probability
from polyformer.core.sequence.tokens import ModelInputs
from polyformer.nn.stack.adaptive_embedding import AdaptiveConfig, AdaptiveEmbedding


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDropoutConfig(Config):
    """The mask of token dropout, and the share of masks in training."""

    mask: NonNegativeInt = 0  # id of the mask token
    rate: Probability = 0.12  # 80% of 15% of the tokens, in all published models


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(Config):
    """The terms of the embedding sum before the first layer."""

    # Token vectors times sqrt(size), Vaswani et al. 2017, section 3.4. By default the sum of tokens, types
    # and languages is scaled before sinusoids, as their length sqrt(size / 2) would dominate it.
    scaled: bool | None = None
    multiplier: PositiveFloat = 1.0  # a further factor of token vectors (Granite)
    normed: bool = False  # a norm after the sum, as in BERT
    type_vocab_size: NonNegativeInt = 0  # token types (BERT's segments); 0 for none
    shared: bool = True  # one token table for encoder and decoder
    tied: bool = True  # the output layer reads the token table too
    size: PositiveInt | None = None  # width of the sum; by default hidden_size
    num_languages: NonNegativeInt = 0  # number of language vectors (XLM's `langs`); 0 for none
    embedding_dropout: Probability | None = None  # of the sum; by default the stack's
    adaptive: AdaptiveConfig | None = None  # rarer tokens have narrower vectors
    token_dropout: TokenDropoutConfig | None = None  # masks have no vector; for encoders

    def __post_init__(self) -> None:
        if self.size is not None and self.adaptive is not None:
            raise InputError(
                "size: adaptive token vectors have their own widths; set adaptive.d_embed instead"
            )

    def width(self, hidden_size: int) -> int:
        """Return the width of the sum in a model of `hidden_size`."""
        return hidden_size if self.size is None else self.size

    def tokens(self, vocab_size: int, hidden_size: int) -> nn.Embedding | AdaptiveEmbedding:
        """Return the table of token vectors."""
        if self.adaptive is not None:
            return AdaptiveEmbedding(self.adaptive, vocab_size, hidden_size)
        return nn.Embedding(vocab_size, self.width(hidden_size))

    def build(self, hidden_size: int, norm: NormConfig, dropout: float, position: Position) -> "Embedding":
        """Return the sum before a stack with this position scheme."""
        kind = Embedding if self.token_dropout is None else TokenDropoutEmbedding
        return kind(self, hidden_size, norm, dropout, position)


class Embedding(nn.Module):
    """The embedding sum: token vectors [B, T, size] to the input of the first layer [B, T, E].

    position: the stack's, which may project the sum to E itself (`projects_input`), or require scaled token
    vectors.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        hidden_size: int,
        norm: NormConfig,
        dropout: float,
        position: Position,
    ):
        super().__init__()
        width = config.width(hidden_size)
        self.factor = config.multiplier * (math.sqrt(width) if config.scaled else 1.0)
        scales_sum = config.scaled is None and position.adds_sinusoids
        self.sum_factor = math.sqrt(width) if scales_sum else 1.0
        self.types = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.languages = nn.Embedding(config.num_languages, width) if config.num_languages else None
        self.norm = (
            norm.build(hidden_size if position.projects_input else width) if config.normed else nn.Identity()
        )
        self.dropout = Dropout(dropout if config.embedding_dropout is None else config.embedding_dropout)
        self.as_wide = position.projects_input or config.size is None
        self.widen = nn.Identity() if self.as_wide else Linear(width, hidden_size)
        self.normed = config.normed

    def forward(self, tokens: Tensor, position: Position, pos: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the sum, with type 0 and no language by default; `InputError` for a missing table."""
        x = tokens * self.factor if self.factor != 1.0 else tokens
        if self.types is not None or inputs.token_type_ids is not None:
            x = _add_rows(
                x, self.types, pos, inputs.token_type_ids, "token_type_ids", "embedding.type_vocab_size"
            )
        if inputs.langs is not None:
            x = _add_rows(x, self.languages, pos, inputs.langs, "langs", "embedding.num_languages")
        x = x * self.sum_factor if self.sum_factor != 1.0 else x
        x = position.embed(x, pos, 0)
        if self.normed:
            mask = inputs.attention_mask  # with a state it may cover the past too
            x = normalize(self.norm, x, None if mask is None else mask[:, -x.shape[1] :].bool())
        x = self.dropout(x) if self.training else x
        return x if self.as_wide else self.widen(x)


class TokenDropoutEmbedding(Embedding):
    """The embedding sum of token vectors that depend on the masks of their document (token dropout).

    Token vectors without ids (`inputs_embeds`) stay as they are.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        hidden_size: int,
        norm: NormConfig,
        dropout: float,
        position: Position,
    ):
        super().__init__(config, hidden_size, norm, dropout, position)
        assert config.token_dropout is not None
        self.mask, self.rate = config.token_dropout.mask, config.token_dropout.rate

    def forward(self, tokens: Tensor, position: Position, pos: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the sum for scaled token vectors; padding counts neither as tokens nor as masks."""
        ids = inputs.text_ids
        if ids is not None:
            tokens = tokens * self.factors(ids, inputs, tokens.dtype)[..., None]
        return super().forward(tokens, position, pos, inputs)

    def factors(self, ids: Tensor, inputs: ModelInputs, dtype: torch.dtype) -> Tensor:
        """Return the factors [B, T] of token vectors in `dtype`: 0 of masks."""
        valid, documents = inputs.attention_mask, inputs.document_ids
        real = torch.ones_like(ids) if valid is None else valid.long()
        seen = ids != self.mask
        # counts are exact in float32, and the quotient is rounded a single time
        wide = torch.promote_types(dtype, torch.float32)
        totals, kept = (_document_sums(x, documents).to(wide) for x in (real, real * seen))
        return ((1 - self.rate) * totals / kept.clamp_min(1) * seen).to(dtype)


def _document_sums(counts: Tensor, documents: Tensor | None) -> Tensor:
    """Return for each token the sum of `counts` [B, T] over its document, by default the row."""
    if documents is None:
        return counts.sum(1, keepdim=True).expand_as(counts)
    # ids of documents may be any increasing numbers
    index = torch.nn.functional.pad(documents.diff(dim=1).ne(0).cumsum(1), (1, 0))
    return torch.zeros_like(counts).scatter_add_(1, index, counts).gather(1, index)


def _add_rows(
    x: Tensor, table: nn.Embedding | None, pos: Tensor, numbers: Tensor | None, name: str, option: str
) -> Tensor:
    """Return x [B, T, size] plus the rows `numbers` [B, T] of a table, by default its first row."""
    if table is None:
        raise InputError(f"{name}: this model has none ({option} is 0); leave them out")
    if numbers is None:
        return x + table(torch.zeros_like(pos))
    if (known := bounds(numbers)) is not None:
        low, high = known
        if low < 0 or high >= table.num_embeddings:
            most = table.num_embeddings - 1
            raise InputError(f"{name}: expected numbers from 0 to {most}, got {low} to {high}")
    return x + table(numbers)
