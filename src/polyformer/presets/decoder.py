"""Language models: a decoder alone."""

from polyformer.block import PreNormConfig
from polyformer.feedforward import DenseConfig
from polyformer.model import ModelConfig
from polyformer.position import LearnedConfig
from polyformer.presets.base import register
from polyformer.stack import AttentionConfig, StackConfig


def decoder(layers: int, width: int, heads: int, vocab: int, positions: int) -> ModelConfig:
    """Pre-norm, learned positions, tied embeddings, feed-forward of four times the width: GPT-2's layout."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=positions,
        decoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(num_attention_heads=heads),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu_tanh"),
            position=LearnedConfig(),
            block=PreNormConfig(),
        ),
        initializer_range=0.02,
    )


@register("gpt")
def gpt() -> ModelConfig:
    """Radford et al. 2018, section 4.1: post-norm, 117M parameters."""
    return decoder(12, 768, 12, vocab=40478, positions=512).override("block", "post")


@register("gpt2")
def gpt2() -> ModelConfig:
    """Radford et al. 2019, table 2, the smallest: 124M parameters (the table says 117M)."""
    return decoder(12, 768, 12, vocab=50257, positions=1024)


@register("gpt2-medium")
def gpt2_medium() -> ModelConfig:
    """Radford et al. 2019, table 2: 24 layers of 1024, 355M parameters (the table says 345M)."""
    return decoder(24, 1024, 16, vocab=50257, positions=1024)


@register("gpt2-large")
def gpt2_large() -> ModelConfig:
    """Radford et al. 2019, table 2: 36 layers of 1280, 774M parameters (the table says 762M)."""
    return decoder(36, 1280, 20, vocab=50257, positions=1024)


@register("gpt2-xl")
def gpt2_xl() -> ModelConfig:
    """Radford et al. 2019, table 2, the largest: 48 layers of 1600, 1558M parameters (in it 1542M)."""
    return decoder(48, 1600, 25, vocab=50257, positions=1024)


@register("decoder-small")
def decoder_small() -> ModelConfig:
    """For two cores: 4 layers of 256."""
    return decoder(4, 256, 8, vocab=8000, positions=512)


@register("decoder-tiny")
def decoder_tiny() -> ModelConfig:
    """For a demonstration in minutes, and for tests: 2 layers of 128."""
    return decoder(2, 128, 4, vocab=512, positions=256)
