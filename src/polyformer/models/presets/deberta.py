"""DeBERTa: BERT with disentangled positions instead of absolute ones. He et al. 2021; He et al. 2023."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import DebertaConfig, PositionConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes, size_options

EPS = 1e-7


def disentangled(
    layers: int, width: int, heads: int, vocab: int, position: PositionConfig, bias: bool | tuple[str, ...]
) -> ModelConfig:
    """Return BERT's layout with these positions and without token types."""
    changes = {
        **size_options(layers, width, heads),
        "vocab_size": vocab,
        "type_vocab_size": 0,
        "mechanism": SoftmaxConfig(dropout=0.1),
        "encoder.attention.bias": bias,
        "eps": EPS,
        "position": position,
    }
    return model_config("bert-base", changes)


FIRST = {
    "deberta-base": ((12, 768, 12), "100M"),  # microsoft/deberta-base
}
V3 = {
    "deberta-v3-small": ((6, 768, 12), "44M"),  # microsoft/deberta-v3-small, and 98M of token vectors
    "deberta-v3-base": ((12, 768, 12), "86M"),  # microsoft/deberta-v3-base, and 98M of token vectors
}


@register_sizes(
    "DeBERTa encoder: {layers} layers of {width}, {} parameters without tokens (He et al. 2021, table 8).",
    FIRST,
)
def deberta(layers: int, width: int, heads: int) -> ModelConfig:
    """Return the first version; its key projections have no bias."""
    position = DebertaConfig(eps=EPS, dropout=0.1)
    return disentangled(layers, width, heads, 50265, position, bias=("query", "value", "output"))


@register_sizes(
    "DeBERTa V3 encoder: {layers} layers of {width}, {} parameters without tokens (He et al. 2023, table 5).",
    V3,
)
def deberta_v3(layers: int, width: int, heads: int) -> ModelConfig:
    """Return version 2 or 3: logarithmic buckets, and positions share the projections of contents."""
    position = DebertaConfig(
        max_relative_positions=512,
        buckets=256,
        share_projections=True,
        norm_embeddings=True,
        eps=EPS,
        dropout=0.1,
    )
    return disentangled(layers, width, heads, 128100, position, bias=True)
