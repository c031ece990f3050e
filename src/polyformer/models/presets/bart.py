"""BART: the Transformer with GELU, learned positions and a normalized embedding sum. Lewis et al. 2020."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import LearnedConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

SIZES = {
    "bart-base": ((6, 768, 12), "139M", "section 4"),  # facebook/bart-base
    "bart-large": ((12, 1024, 16), "406M", "section 5"),
}


@register_sizes(
    "BART encoder-decoder: {layers} + {layers} layers of {width}, {} parameters (Lewis et al. 2020, {}).",
    SIZES,
)
def bart(layers: int, width: int, heads: int) -> ModelConfig:
    """Return equal post-norm stacks; the position table has two unused rows before the first position."""
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(num_attention_heads=heads, mechanism=SoftmaxConfig(dropout=0.1)),
        feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu", inner_dropout=0.1),
        position=LearnedConfig(offset=2),
    )
    return ModelConfig(
        vocab_size=50265,
        hidden_size=width,
        max_position_embeddings=1024,
        embedding=EmbeddingConfig(scaled=False, normed=True),
        encoder=stack,
        decoder=stack,
        head=LanguageModelConfig(bias=True, frozen_bias=True),
        special=SpecialTokens(pad=1, bos=2, eos=2),
        initializer_range=0.02,
    )
