"""Llama and the models of its layout: Mistral, Qwen2 and Qwen3, SmolLM2, Phi-3, OLMo 2, Gemma 3, LLaDA.

Pre-norm with RMS norms, rotary positions, SwiGLU, no biases and no dropout; later sizes share keys and values
among groups of heads. Touvron et al. 2023 (two papers), Grattafiori et al. 2024, Jiang et al. 2023,
Yang et al. 2024, Yang et al. 2025, Ben Allal et al. 2025, Abdin et al. 2024, OLMo Team 2024,
Gemma Team 2025. LLaDA is an encoder (Nie et al. 2025).
"""

import dataclasses
from dataclasses import dataclass

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import PerLayer, Window
from polyformer.attention.patterns.implied import Full
from polyformer.attention.positions import RopeConfig
from polyformer.attention.positions.rope_extensions import Llama3Config
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import SizedPreset, model_config, register_presets, size_options
from polyformer.nn.block import PreNormConfig, SandwichConfig
from polyformer.nn.feedforward import GatedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


@dataclass(frozen=True, kw_only=True)
class LlamaPreset(SizedPreset):
    """Llama 2's layout.

    Args:
        inner_width: the width of feed-forward layers.
        key_value_heads: the number of heads of keys and values.
        positions: the largest number of tokens.
        eps: the epsilon of the norms.
        base: the base of the rotary frequencies.
        tied: whether the output layer shares the token vectors.
        ends: the ids of the begin and the end of a text.
    """

    inner_width: int
    key_value_heads: int
    positions: int = 4096
    eps: float = 1e-5
    vocabulary: int = 32000
    base: float = 10_000.0
    tied: bool = False
    ends: tuple[int, int] = (1, 2)

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            max_position_embeddings=self.positions,
            embedding=EmbeddingConfig(tied=self.tied),
            decoder=StackConfig(
                num_hidden_layers=self.layers,
                attention=AttentionConfig(
                    num_attention_heads=self.heads, num_key_value_heads=self.key_value_heads, bias=False
                ),
                feedforward=GatedConfig(intermediate_size=self.inner_width),
                position=RopeConfig(base=self.base),
                block=PreNormConfig(),
                norm=RMSNormConfig(eps=self.eps),
                dropout=0.0,
            ),
            special=SpecialTokens(bos=self.ends[0], eos=self.ends[1]),
            initializer_range=0.02,
        )


@dataclass(frozen=True, kw_only=True)
class LladaPreset(LlamaPreset):
    """LLaDA's layout: Llama's with attention in both directions.

    Args:
        mask: the id of the mask token.
    """

    mask: int

    def config(self) -> ModelConfig:
        config = super().config()
        special = dataclasses.replace(config.special, pad=self.ends[1], bos=None, mask=self.mask)
        embedding = dataclasses.replace(config.embedding, embedding_dropout=0.0)
        sides = {"encoder": config.decoder, "decoder": None}
        return dataclasses.replace(config, embedding=embedding, special=special, **sides)


register_presets(
    LlamaPreset(
        "llama-7b",
        "LLaMA decoder, the first version: 32 layers of 4096, 6.7B parameters "
        "(Touvron et al. 2023, table 2).",
        layers=32,
        width=4096,
        heads=32,
        inner_width=11008,
        key_value_heads=32,
        positions=2048,
        eps=1e-6,
    ),
    LlamaPreset(
        "llama-2-7b",
        "Llama 2 decoder, 4096 tokens: 32 layers of 4096, 6.7B parameters (Touvron et al. 2023, table 1).",
        layers=32,
        width=4096,
        heads=32,
        inner_width=11008,
        key_value_heads=32,
    ),
    LlamaPreset(
        "llama-2-70b",
        "Llama 2 decoder: 80 layers of 8192, 69B parameters, grouped heads (Touvron et al. 2023, table 1).",
        layers=80,
        width=8192,
        heads=64,
        inner_width=28672,
        key_value_heads=8,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Llama3Preset(LlamaPreset):
    """Llama 3's layout: 128,256 tokens, a base of 500,000.

    Args:
        extended: whether positions reach 131,072 by an extension of RoPE, as in version 3.2.
    """

    positions: int = 8192
    vocabulary: int = 128256
    base: float = 500_000.0
    ends: tuple[int, int] = (128000, 128001)
    extended: bool = False

    def config(self) -> ModelConfig:
        config = super().config()
        if not self.extended:
            return config
        extension = Llama3Config(factor=32.0, original_max_positions=self.positions)
        config = config.override("position", RopeConfig(base=self.base, extension=extension))
        return dataclasses.replace(config, max_position_embeddings=131072)


register_presets(
    Llama3Preset(
        "llama-3-8b",
        "Llama 3 decoder: 32 layers of 4096, 8.0B parameters (Grattafiori et al. 2024, table 3).",
        layers=32,
        width=4096,
        heads=32,
        inner_width=14336,
        key_value_heads=8,
    ),
    Llama3Preset(
        "llama-3.2-1b",
        "Llama 3.2 decoder: 16 layers of 2048, RoPE extended from 8,192, 1.24B parameters "
        "(model card, 2024).",
        layers=16,
        width=2048,
        heads=32,
        inner_width=8192,
        key_value_heads=8,
        tied=True,
        extended=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class MistralPreset(LlamaPreset):
    """Llama's layout with sliding-window attention."""

    positions: int = 32768

    def config(self) -> ModelConfig:
        return super().config().override("mechanism", SoftmaxConfig(pattern=Window(4095, 0)))


register_presets(
    MistralPreset(
        "mistral-7b",
        "Mistral decoder, a window of 4,096 tokens: 32 layers of 4096 (Jiang et al. 2023, table 1).",
        layers=32,
        width=4096,
        heads=32,
        inner_width=14336,
        key_value_heads=8,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Phi3Preset(LlamaPreset):
    """Llama's layout for texts of 4,096 tokens."""

    vocabulary: int = 32064
    ends: tuple[int, int] = (1, 32000)


register_presets(
    Phi3Preset(
        "phi-3-mini",
        "Phi-3 decoder: 32 layers of 3072, 3.8B parameters (Abdin et al. 2024).",
        layers=32,
        width=3072,
        heads=32,
        inner_width=8192,
        key_value_heads=32,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Qwen2Preset(LlamaPreset):
    """Llama's layout with biases of queries, keys and values, and a base of 1,000,000."""

    positions: int = 131072
    eps: float = 1e-6
    base: float = 1_000_000.0
    ends: tuple[int, int] = (151643, 151643)

    def config(self) -> ModelConfig:
        return super().config().override("decoder.attention.bias", ("query", "key", "value"))


register_presets(
    Qwen2Preset(
        "qwen2-0.5b",
        "Qwen2 decoder, tied: 24 layers of 896, 0.49B parameters (Yang et al. 2024, table 1).",
        layers=24,
        width=896,
        heads=14,
        inner_width=4864,
        key_value_heads=2,
        vocabulary=151936,
        tied=True,
    ),
    Qwen2Preset(
        "qwen2-7b",
        "Qwen2 decoder: 28 layers of 3584, 7.6B parameters (Yang et al. 2024, table 1).",
        layers=28,
        width=3584,
        heads=28,
        inner_width=18944,
        key_value_heads=4,
        vocabulary=152064,
        tied=False,
    ),
)


@dataclass(frozen=True, kw_only=True)
class SmolLM2Preset(LlamaPreset):
    """Llama's layout with tied embeddings and a vocabulary of 49152 tokens."""

    positions: int = 8192
    vocabulary: int = 49152
    tied: bool = True
    ends: tuple[int, int] = (0, 0)


register_presets(
    SmolLM2Preset(
        "smollm2-135m",
        "SmolLM2 decoder in Llama's layout: 30 layers of 576, 135M parameters (Ben Allal et al. 2025).",
        layers=30,
        width=576,
        heads=9,
        inner_width=1536,
        key_value_heads=3,
        base=100_000.0,
    ),
    SmolLM2Preset(
        "smollm2-360m",
        "SmolLM2 decoder in Llama's layout: 32 layers of 960, 362M parameters (Ben Allal et al. 2025).",
        layers=32,
        width=960,
        heads=15,
        inner_width=2560,
        key_value_heads=5,
        base=100_000.0,
    ),
    SmolLM2Preset(
        "smollm2-1.7b",
        "SmolLM2 decoder in Llama's layout: 24 layers of 2048, 1.7B parameters (Ben Allal et al. 2025).",
        layers=24,
        width=2048,
        heads=32,
        inner_width=8192,
        key_value_heads=32,
        base=130_000.0,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Olmo2Preset(LlamaPreset):
    """Llama's layout with norms after sub-layers and of whole projections of queries and keys."""

    eps: float = 1e-6
    base: float = 500_000.0

    def config(self) -> ModelConfig:
        config = super().config().override("block", SandwichConfig(input_norm=False))
        config = config.override("decoder.attention.qk_norm_of", "projection")
        config = config.override("decoder.attention.qk_norm", RMSNormConfig(eps=self.eps))
        return dataclasses.replace(config, special=SpecialTokens(pad=100277, eos=100257))


register_presets(
    Olmo2Preset(
        "olmo-2-1b",
        "OLMo 2 decoder: 16 layers of 2048, 1.5B parameters (OLMo Team 2024, section 2).",
        layers=16,
        width=2048,
        heads=16,
        inner_width=8192,
        key_value_heads=16,
        vocabulary=100352,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Qwen3Preset(LlamaPreset):
    """Llama's layout with heads of 128 channels, and norms of their queries and keys."""

    positions: int = 40960
    eps: float = 1e-6
    vocabulary: int = 151936
    base: float = 1_000_000.0
    ends: tuple[int, int] = (151643, 151645)

    def config(self) -> ModelConfig:
        config = super().config().override("decoder.attention.qk_norm", RMSNormConfig(eps=self.eps))
        return config.override("decoder.attention.head_size", 128)


register_presets(
    Qwen3Preset(
        "qwen3-0.6b",
        "Qwen3 decoder: 28 layers of 1024, 0.6B parameters (Yang et al. 2025, table 1).",
        layers=28,
        width=1024,
        heads=16,
        inner_width=3072,
        key_value_heads=8,
        tied=True,
    ),
)


GLOBAL, LOCAL = 1_000_000.0, 10_000.0
"""The RoPE bases of Gemma's layers with full attention and of windowed layers."""


@dataclass(frozen=True, kw_only=True)
class Gemma3Preset(SizedPreset):
    """Gemma 3: five layers with a window of 512 tokens and then one with full attention, repeated."""

    inner_width: int
    key_value_heads: int
    vocabulary: int

    def config(self) -> ModelConfig:
        near, norm = Window(511, 0), RMSNormConfig(eps=1e-6, centered=True)
        changes = {
            "num_key_value_heads": self.key_value_heads,
            **size_options(self.layers, self.width, self.heads),
            "intermediate_size": self.inner_width,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "tied": True,
            "mechanism": SoftmaxConfig(pattern=PerLayer((*[near] * 5, Full())), scale=256**-0.5),
            "head_size": 256,
            "activation": "gelu_tanh",
            "position": RopeConfig(bases=(*[LOCAL] * 5, GLOBAL)),
            "block": "sandwich",
            "norm": norm,
            "qk_norm": norm,
            "embedding.scaled": True,
            **{"pad": 0, "bos": 2, "eos": 1},
        }
        return model_config("llama-2-7b", changes)


register_presets(
    Gemma3Preset(
        "gemma-3-1b",
        "Gemma 3 decoder: 26 layers of 1152, five in six of them local, 1.0B parameters "
        "(Gemma Team 2025, table 1).",
        layers=26,
        width=1152,
        heads=4,
        inner_width=6912,
        key_value_heads=1,
        vocabulary=262144,
    ),
)

register_presets(
    LladaPreset(
        "llada-8b",
        "LLaDA, a masked diffusion model: encoder, 32 layers of 4096, 8.0B parameters (Nie et al. 2025).",
        layers=32,
        width=4096,
        heads=32,
        inner_width=12288,
        key_value_heads=32,
        vocabulary=126464,
        base=500_000.0,
        ends=(126080, 126081),
        mask=126336,
    ),
)
