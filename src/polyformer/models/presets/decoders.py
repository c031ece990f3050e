"""Decoder-only language models with absolute positions: the GPT family, GPT-Neo, GPT-J and CTRL."""

import dataclasses
from dataclasses import dataclass

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Full, PerLayer, Window
from polyformer.attention.positions import LearnedConfig, RopeConfig, SinusoidalConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import SizedPreset, register_presets
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, StackConfig


@dataclass(frozen=True, kw_only=True)
class DecoderPreset(SizedPreset):
    """GPT-2's layout: pre-norm, learned positions, tied embeddings.

    Args:
        positions: the largest number of tokens.
    """

    vocabulary: int
    positions: int

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            max_position_embeddings=self.positions,
            decoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(num_attention_heads=self.heads),
                feedforward=DenseConfig(intermediate_size=4 * self.width, activation="gelu_tanh"),
                position=LearnedConfig(),
                block=PreNormConfig(),
            ),
            initializer_range=0.02,
        )


register_presets(
    DecoderPreset(
        "decoder-small",
        "Language model for a CPU: a decoder with 4 layers of 256.",
        layers=4,
        width=256,
        heads=8,
        vocabulary=8000,
        positions=512,
    ),
    DecoderPreset(
        "decoder-tiny",
        "Language model for demonstrations in minutes and for tests: a decoder with 2 layers of 128.",
        layers=2,
        width=128,
        heads=4,
        vocabulary=512,
        positions=256,
    ),
)


@dataclass(frozen=True, kw_only=True)
class GptPreset(DecoderPreset):
    """The first version: post-norm."""

    vocabulary: int = 40478
    positions: int = 512

    def config(self) -> ModelConfig:
        return super().config().override("block", "post")


register_presets(
    GptPreset(
        "gpt",
        "GPT decoder, post-norm: 12 layers of 768, 117M parameters (Radford et al. 2018, section 4.1).",
        layers=12,
        width=768,
        heads=12,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Gpt2Preset(DecoderPreset):
    """GPT-2 with its vocabulary of 50257 tokens."""

    vocabulary: int = 50257
    positions: int = 1024


register_presets(
    Gpt2Preset(
        "gpt2",
        "GPT-2 decoder: 12 layers of 768, 124M parameters (Radford et al. 2019, table 2, says 117M).",
        layers=12,
        width=768,
        heads=12,
    ),
    Gpt2Preset(
        "gpt2-medium",
        "GPT-2 decoder: 24 layers of 1024, 355M parameters (Radford et al. 2019, table 2, says 345M).",
        layers=24,
        width=1024,
        heads=16,
    ),
    Gpt2Preset(
        "gpt2-large",
        "GPT-2 decoder: 36 layers of 1280, 774M parameters (Radford et al. 2019, table 2, says 762M).",
        layers=36,
        width=1280,
        heads=20,
    ),
    Gpt2Preset(
        "gpt2-xl",
        "GPT-2 decoder: 48 layers of 1600, 1558M parameters (Radford et al. 2019, table 2, says 1542M).",
        layers=48,
        width=1600,
        heads=25,
    ),
)

BANDED = PerLayer((Full(), Window(255, 0)))
"""Layers that alternate between full attention and the last 256 tokens."""


@dataclass(frozen=True, kw_only=True)
class Gpt3Preset(DecoderPreset):
    """GPT-2 with alternating dense and banded layers; the paper does not give the band's width."""

    vocabulary: int = 50257
    positions: int = 2048

    def config(self) -> ModelConfig:
        return super().config().override("mechanism", SoftmaxConfig(pattern=BANDED))


register_presets(
    Gpt3Preset(
        "gpt3-125m",
        "GPT-3 decoder, every other layer banded: 12 layers of 768 (Brown et al. 2020, table 2.1).",
        layers=12,
        width=768,
        heads=12,
    ),
    Gpt3Preset(
        "gpt3-6.7b",
        "GPT-3 decoder, every other layer banded: 32 layers of 4096 (Brown et al. 2020, table 2.1).",
        layers=32,
        width=4096,
        heads=32,
    ),
    Gpt3Preset(
        "gpt3-175b",
        "GPT-3 decoder, every other layer banded: 96 layers of 12288 (Brown et al. 2020, table 2.1).",
        layers=96,
        width=12288,
        heads=96,
    ),
)


@dataclass(frozen=True, kw_only=True)
class GptNeoPreset(Gpt3Preset):
    """GPT-3's layers with unscaled scores and without biases of queries, keys and values."""

    def config(self) -> ModelConfig:
        config = super().config().override("dropout", 0.0)
        config = config.override("mechanism", SoftmaxConfig(pattern=BANDED, scale=1.0))
        return config.override("decoder.attention.bias", ("output",))


register_presets(
    GptNeoPreset(
        "gpt-neo-125m",
        "GPT-Neo decoder, every other layer local: 12 layers of 768, 125M parameters (Black et al. 2021).",
        layers=12,
        width=768,
        heads=12,
    ),
    GptNeoPreset(
        "gpt-neo-1.3b",
        "GPT-Neo decoder, every other layer local: 24 layers of 2048, 1.3B parameters (Black et al. 2021).",
        layers=24,
        width=2048,
        heads=16,
    ),
    GptNeoPreset(
        "gpt-neo-2.7b",
        "GPT-Neo decoder, every other layer local: 32 layers of 2560, 2.7B parameters (Black et al. 2021).",
        layers=32,
        width=2560,
        heads=20,
    ),
)


@dataclass(frozen=True, kw_only=True)
class GptJPreset(DecoderPreset):
    """Parallel blocks without attention biases, and an untied output layer with a bias."""

    vocabulary: int = 50400
    positions: int = 2048

    def config(self) -> ModelConfig:
        config = super().config().override("dropout", 0.0)
        config = config.override("block", "parallel").override("tied", False)
        config = config.override("position", RopeConfig(layout="pairs", fraction=0.25))
        config = config.override("decoder.attention.bias", False)
        return dataclasses.replace(config, head=LanguageModelConfig(bias=True))


register_presets(
    GptJPreset(
        "gpt-j-6b",
        "GPT-J decoder: 28 layers of 4096, RoPE on a quarter of each head (Wang and Komatsuzaki 2021).",
        layers=28,
        width=4096,
        heads=16,
    ),
)


@dataclass(frozen=True, kw_only=True)
class CtrlPreset(DecoderPreset):
    """Pre-norm layers with ReLU, sinusoids and scaled token vectors."""

    vocabulary: int = 246534
    positions: int = 256
    inner_width: int

    def config(self) -> ModelConfig:
        config = super().config()
        config = config.override("position", SinusoidalConfig(layout="halves")).override("eps", 1e-6)
        config = config.override("intermediate_size", self.inner_width).override("activation", "relu")
        config = config.override("embedding.scaled", True)
        return dataclasses.replace(config, head=LanguageModelConfig(bias=True))


register_presets(
    CtrlPreset(
        "ctrl",
        "CTRL decoder with control codes: 48 layers of 1280, 1.63B parameters "
        "(Keskar et al. 2019, section 3.2).",
        layers=48,
        width=1280,
        heads=16,
        inner_width=8192,
    ),
)
