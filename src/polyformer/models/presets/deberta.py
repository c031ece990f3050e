"""DeBERTa: BERT with disentangled positions instead of absolute ones. He et al. 2021; He et al. 2023."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import DebertaConfig, PositionConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

EPS = 1e-7


def deberta(
    layers: int, width: int, heads: int, vocab: int, position: PositionConfig, bias: bool | tuple[str, ...]
) -> ModelConfig:
    """BERT's layout without token types; the feed-forward is four times the width."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        embedding=EmbeddingConfig(normed=True),
        encoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(
                num_attention_heads=heads, bias=bias, mechanism=SoftmaxConfig(dropout=0.1)
            ),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu"),
            position=position,
            norm=LayerNormConfig(eps=EPS),
        ),
        head=MaskedConfig(eps=EPS),
        initializer_range=0.02,
    )


@register("deberta-base")
def deberta_base() -> ModelConfig:
    """DeBERTa encoder: 12 layers of 768, 100M parameters without tokens (He et al. 2021, table 8).

    The released checkpoint is microsoft/deberta-base, with 50265 token vectors. Keys have no bias, as in
    the released weights.
    """
    position = DebertaConfig(eps=EPS, dropout=0.1)
    return deberta(12, 768, 12, 50265, position, bias=("query", "value", "output"))


def later(layers: int, width: int, heads: int) -> ModelConfig:
    """The second and third version: logarithmic buckets, and positions projected as contents are."""
    position = DebertaConfig(
        max_relative_positions=512,
        buckets=256,
        share_projections=True,
        norm_embeddings=True,
        eps=EPS,
        dropout=0.1,
    )
    return deberta(layers, width, heads, 128100, position, bias=True)


@register("deberta-v3-small")
def deberta_v3_small() -> ModelConfig:
    """DeBERTa V3 encoder: 6 layers of 768, 44M parameters without tokens (He et al. 2023, table 5).

    The released checkpoint is microsoft/deberta-v3-small, with 98M parameters of token vectors.
    """
    return later(6, 768, 12)


@register("deberta-v3-base")
def deberta_v3_base() -> ModelConfig:
    """DeBERTa V3 encoder: 12 layers of 768, 86M parameters without tokens (He et al. 2023, table 5).

    The released checkpoint is microsoft/deberta-v3-base, with 98M parameters of token vectors.
    """
    return later(12, 768, 12)
