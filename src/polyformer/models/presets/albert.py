"""ALBERT: BERT with narrow token vectors and one layer's weights for all layers. Lan et al. 2020."""

from polyformer.attention.positions import LearnedConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def albert(layers: int, width: int, heads: int) -> ModelConfig:
    """30000 tokens with vectors of 128, and no dropout, as its second version was trained."""
    return ModelConfig(
        vocab_size=30000,
        hidden_size=width,
        embedding=EmbeddingConfig(normed=True, type_vocab_size=2, size=128),
        encoder=StackConfig(
            num_hidden_layers=layers,
            num_hidden_groups=1,
            attention=AttentionConfig(num_attention_heads=heads),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu_tanh"),
            position=LearnedConfig(),
            norm=LayerNormConfig(eps=1e-12),
            dropout=0.0,
        ),
        head=MaskedConfig(activation="gelu_tanh"),
        special=SpecialTokens(pad=0, bos=2, eos=3),
        initializer_range=0.02,
    )


@register("albert-base")
def albert_base() -> ModelConfig:
    """ALBERT encoder with shared layers: 12 layers of 768 (Lan et al. 2020, table 1: 12M parameters)."""
    return albert(12, 768, 12)


@register("albert-large")
def albert_large() -> ModelConfig:
    """ALBERT encoder with shared layers: 24 layers of 1024 (Lan et al. 2020, table 1: 18M parameters)."""
    return albert(24, 1024, 16)


@register("albert-xxlarge")
def albert_xxlarge() -> ModelConfig:
    """ALBERT encoder with shared layers: 12 layers of 4096 (Lan et al. 2020, table 1: 235M parameters).

    The released weights are 223M.
    """
    return albert(12, 4096, 64)
