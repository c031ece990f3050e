"""ALBERT: BERT with narrow token vectors and one layer's weights for all layers. Lan et al. 2020."""

from polyformer.attention.positions import LearnedConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

SIZES = {
    "albert-base": ((12, 768, 12), "12M"),
    "albert-large": ((24, 1024, 16), "18M"),
    "albert-xxlarge": ((12, 4096, 64), "235M"),  # the released weights are 223M
}


@register_sizes(
    "ALBERT encoder with shared layers: {layers} layers of {width} "
    "(Lan et al. 2020, table 1: {} parameters).",
    SIZES,
)
def albert(layers: int, width: int, heads: int) -> ModelConfig:
    """Return version 2: 30000 tokens with vectors of 128, and no dropout."""
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
