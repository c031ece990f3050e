"""Decoder-only language models: the GPT family and CTRL."""

import dataclasses

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Full, PerLayer, Window
from polyformer.attention.positions import LearnedConfig, RopeConfig, SinusoidalConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig

DECODERS = {  # layers, width, heads, vocabulary, positions
    "decoder-small": ((4, 256, 8, 8000, 512), "a CPU"),
    "decoder-tiny": ((2, 128, 4, 512, 256), "demonstrations in minutes and for tests"),
}
GPT = {"gpt": ((12, 768, 12),)}
GPT2 = {
    "gpt2": ((12, 768, 12), "124M", "117M"),
    "gpt2-medium": ((24, 1024, 16), "355M", "345M"),
    "gpt2-large": ((36, 1280, 20), "774M", "762M"),
    "gpt2-xl": ((48, 1600, 25), "1558M", "1542M"),
}
GPT3 = {
    "gpt3-125m": ((12, 768, 12),),
    "gpt3-6.7b": ((32, 4096, 32),),
    "gpt3-175b": ((96, 12288, 96),),
}
GPT_NEO = {
    "gpt-neo-125m": ((12, 768, 12), "125M"),
    "gpt-neo-1.3b": ((24, 2048, 16), "1.3B"),
    "gpt-neo-2.7b": ((32, 2560, 20), "2.7B"),
}
GPT_J = {"gpt-j-6b": ((28, 4096, 16),)}
CTRL = {"ctrl": ((48, 1280, 16, 8192),)}


@register_sizes("Language model for {}: a decoder with {layers} layers of {width}.", DECODERS)
def decoder(layers: int, width: int, heads: int, vocab: int, positions: int) -> ModelConfig:
    """Return GPT-2's layout: pre-norm, learned positions, tied embeddings."""
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


@register_sizes(
    "GPT decoder, post-norm: {layers} layers of {width}, 117M parameters (Radford et al. 2018, section 4.1).",
    GPT,
)
def gpt(layers: int, width: int, heads: int) -> ModelConfig:
    """Return the first version: post-norm."""
    return decoder(layers, width, heads, vocab=40478, positions=512).override("block", "post")


@register_sizes(
    "GPT-2 decoder: {layers} layers of {width}, {} parameters (Radford et al. 2019, table 2, says {}).", GPT2
)
def gpt2(layers: int, width: int, heads: int) -> ModelConfig:
    """Return GPT-2 with its vocabulary of 50257 tokens."""
    return decoder(layers, width, heads, vocab=50257, positions=1024)


BANDED = PerLayer((Full(), Window(255, 0)))
"""Layers that alternate between full attention and the last 256 tokens."""


@register_sizes(
    "GPT-3 decoder, every other layer banded: {layers} layers of {width} (Brown et al. 2020, table 2.1).",
    GPT3,
)
def gpt3(layers: int, width: int, heads: int) -> ModelConfig:
    """Return GPT-2 with alternating dense and banded layers; the paper does not give the band's width."""
    config = decoder(layers, width, heads, vocab=50257, positions=2048)
    return config.override("mechanism", SoftmaxConfig(pattern=BANDED))


@register_sizes(
    "GPT-Neo decoder, every other layer local: {layers} layers of {width}, {} parameters "
    "(Black et al. 2021).",
    GPT_NEO,
)
def gpt_neo(layers: int, width: int, heads: int) -> ModelConfig:
    """Return GPT-3's layers with unscaled scores and without biases of queries, keys and values."""
    config = gpt3(layers, width, heads).override("dropout", 0.0)
    config = config.override("mechanism", SoftmaxConfig(pattern=BANDED, scale=1.0))
    return config.override("decoder.attention.bias", ("output",))


@register_sizes(
    "GPT-J decoder: {layers} layers of {width}, RoPE on a quarter of each head (Wang and Komatsuzaki 2021).",
    GPT_J,
)
def gpt_j(layers: int, width: int, heads: int) -> ModelConfig:
    """Return parallel blocks without attention biases, and an untied output layer with a bias."""
    config = decoder(layers, width, heads, vocab=50400, positions=2048).override("dropout", 0.0)
    config = config.override("block", "parallel").override("tied", False)
    config = config.override("position", RopeConfig(layout="pairs", fraction=0.25))
    config = config.override("decoder.attention.bias", False)
    return dataclasses.replace(config, head=LanguageModelConfig(bias=True))


@register_sizes(
    "CTRL decoder with control codes: {layers} layers of {width}, 1.63B parameters "
    "(Keskar et al. 2019, section 3.2).",
    CTRL,
)
def ctrl(layers: int, width: int, heads: int, intermediate: int) -> ModelConfig:
    """Return pre-norm layers with ReLU, sinusoids and scaled token vectors."""
    config = decoder(layers, width, heads, vocab=246534, positions=256)
    config = config.override("position", SinusoidalConfig(layout="halves")).override("eps", 1e-6)
    config = config.override("intermediate_size", intermediate).override("activation", "relu")
    return dataclasses.replace(config.override("embedding.scaled", True), head=LanguageModelConfig(bias=True))
