"""BART: the encoder-decoder of 2017 with GELU, learned positions and a norm below. Lewis et al. 2020."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import LearnedConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def bart(layers: int, width: int, heads: int) -> ModelConfig:
    """Equal stacks, post-norm, a feed-forward of four times the width, two rows before the positions."""
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


@register("bart-base")
def bart_base() -> ModelConfig:
    """BART encoder-decoder: 6 + 6 layers of 768, 139M parameters (Lewis et al. 2020, section 4).

    The released checkpoint is facebook/bart-base.
    """
    return bart(6, 768, 12)


@register("bart-large")
def bart_large() -> ModelConfig:
    """BART encoder-decoder: 12 + 12 layers of 1024, 406M parameters (Lewis et al. 2020, section 5)."""
    return bart(12, 1024, 16)
