"""Language models: a decoder alone."""

import dataclasses

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Full, PerLayer, Window
from polyformer.attention.positions import LearnedConfig, RopeConfig, SinusoidalConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig


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
    """GPT decoder, post-norm: 12 layers of 768, 117M parameters (Radford et al. 2018, section 4.1)."""
    return decoder(12, 768, 12, vocab=40478, positions=512).override("block", "post")


@register("gpt2")
def gpt2() -> ModelConfig:
    """GPT-2 decoder: 12 layers of 768, 124M parameters (Radford et al. 2019, table 2, says 117M)."""
    return decoder(12, 768, 12, vocab=50257, positions=1024)


@register("gpt2-medium")
def gpt2_medium() -> ModelConfig:
    """GPT-2 decoder: 24 layers of 1024, 355M parameters (Radford et al. 2019, table 2, says 345M)."""
    return decoder(24, 1024, 16, vocab=50257, positions=1024)


@register("gpt2-large")
def gpt2_large() -> ModelConfig:
    """GPT-2 decoder: 36 layers of 1280, 774M parameters (Radford et al. 2019, table 2, says 762M)."""
    return decoder(36, 1280, 20, vocab=50257, positions=1024)


@register("gpt2-xl")
def gpt2_xl() -> ModelConfig:
    """GPT-2 decoder: 48 layers of 1600, 1558M parameters (Radford et al. 2019, table 2, says 1542M)."""
    return decoder(48, 1600, 25, vocab=50257, positions=1024)


BANDED = PerLayer((Full(), Window(255, 0)))
"""Layers that see all and layers that see the last 256 tokens, in turn."""


def gpt3(layers: int, width: int, heads: int) -> ModelConfig:
    """GPT-2 with dense and locally banded layers in turn; the width of the windows is not in the paper."""
    config = decoder(layers, width, heads, vocab=50257, positions=2048)
    return config.override("mechanism", SoftmaxConfig(pattern=BANDED))


@register("gpt3-125m")
def gpt3_125m() -> ModelConfig:
    """GPT-3 decoder, every other layer banded: 12 layers of 768 (Brown et al. 2020, table 2.1)."""
    return gpt3(12, 768, 12)


@register("gpt3-6.7b")
def gpt3_7b() -> ModelConfig:
    """GPT-3 decoder, every other layer banded: 32 layers of 4096 (Brown et al. 2020, table 2.1)."""
    return gpt3(32, 4096, 32)


@register("gpt3-175b")
def gpt3_175b() -> ModelConfig:
    """GPT-3 decoder, every other layer banded: 96 layers of 12288 (Brown et al. 2020, table 2.1)."""
    return gpt3(96, 12288, 96)


def gpt_neo(layers: int, width: int, heads: int) -> ModelConfig:
    """GPT-3's layers with unscaled scores, and no bias in the projections to queries, keys and values."""
    config = gpt3(layers, width, heads).override("dropout", 0.0)
    config = config.override("mechanism", SoftmaxConfig(pattern=BANDED, scale=1.0))
    return config.override("decoder.attention.bias", ("output",))


@register("gpt-neo-125m")
def gpt_neo_125m() -> ModelConfig:
    """GPT-Neo decoder, every other layer local: 12 layers of 768, 125M parameters (Black et al. 2021)."""
    return gpt_neo(12, 768, 12)


@register("gpt-neo-1.3b")
def gpt_neo_1b() -> ModelConfig:
    """GPT-Neo decoder, every other layer local: 24 layers of 2048, 1.3B parameters (Black et al. 2021)."""
    return gpt_neo(24, 2048, 16)


@register("gpt-neo-2.7b")
def gpt_neo_3b() -> ModelConfig:
    """GPT-Neo decoder, every other layer local: 32 layers of 2560, 2.7B parameters (Black et al. 2021)."""
    return gpt_neo(32, 2560, 20)


@register("gpt-j-6b")
def gpt_j() -> ModelConfig:
    """GPT-J decoder: 28 layers of 4096, RoPE on a quarter of each head (Wang and Komatsuzaki 2021)."""
    config = decoder(28, 4096, 16, vocab=50400, positions=2048).override("dropout", 0.0)
    config = config.override("block", "parallel").override("tied", False)
    config = config.override("position", RopeConfig(layout="pairs", fraction=0.25))
    return dataclasses.replace(
        config.override("decoder.attention.bias", False), head=LanguageModelConfig(bias=True)
    )


@register("ctrl")
def ctrl() -> ModelConfig:
    """CTRL decoder with control codes: 48 layers of 1280, 1.63B parameters (Keskar et al. 2019, section
    3.2).

    Sinusoids, all sines first, beside token vectors scaled by the root of their width.
    """
    config = decoder(48, 1280, 16, vocab=246534, positions=256)
    config = config.override("position", SinusoidalConfig(layout="halves")).override("eps", 1e-6)
    config = config.override("intermediate_size", 8192).override("activation", "relu")
    return dataclasses.replace(config.override("embedding.scaled", True), head=LanguageModelConfig(bias=True))


@register("decoder-small")
def decoder_small() -> ModelConfig:
    """Language model for a CPU: a decoder with 4 layers of 256."""
    return decoder(4, 256, 8, vocab=8000, positions=512)


@register("decoder-tiny")
def decoder_tiny() -> ModelConfig:
    """Language model for demonstrations in minutes and for tests: a decoder with 2 layers of 128."""
    return decoder(2, 128, 4, vocab=512, positions=256)
