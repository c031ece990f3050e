"""Llama and the decoders of its layout: Mistral, Qwen2, SmolLM.

Pre-norm with RMS norms, rotary positions, SwiGLU, no biases and no dropout; later sizes share keys and values
among groups of heads. Touvron et al. 2023 (two papers), Grattafiori et al. 2024, Jiang et al. 2023,
Yang et al. 2024, Ben Allal et al. 2025.
"""

import dataclasses

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import RopeConfig
from polyformer.attention.positions.rope.context_extension import Llama3Config
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import GatedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def llama(
    layers: int,
    width: int,
    heads: int,
    inner: int,
    *,
    groups: int | None = None,
    vocab: int = 32000,
    positions: int = 4096,
    base: float = 10000.0,
    eps: float = 1e-5,
    tied: bool = False,
    ends: tuple[int, int] = (1, 2),
) -> ModelConfig:
    """Llama 2's layout; `groups`: heads of keys and values; `ends`: ids of the text's begin and end."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=positions,
        embedding=EmbeddingConfig(tied=tied),
        decoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(
                num_attention_heads=heads, num_key_value_heads=groups or heads, bias=False
            ),
            feedforward=GatedConfig(intermediate_size=inner),
            position=RopeConfig(base=base),
            block=PreNormConfig(),
            norm=RMSNormConfig(eps=eps),
            dropout=0.0,
        ),
        special=SpecialTokens(bos=ends[0], eos=ends[1]),
        initializer_range=0.02,
    )


@register("llama-7b")
def llama_7b() -> ModelConfig:
    """LLaMA decoder, the first version: 32 layers of 4096, 6.7B parameters (Touvron et al. 2023, table 2)."""
    return llama(32, 4096, 32, 11008, positions=2048, eps=1e-6)


@register("llama-2-7b")
def llama_2_7b() -> ModelConfig:
    """Llama 2 decoder, 4096 tokens: 32 layers of 4096, 6.7B parameters (Touvron et al. 2023, table 1)."""
    return llama(32, 4096, 32, 11008)


@register("llama-2-70b")
def llama_2_70b() -> ModelConfig:
    """Llama 2 decoder: 80 layers of 8192, 69B parameters, grouped heads (Touvron et al. 2023, table 1)."""
    return llama(80, 8192, 64, 28672, groups=8)


def llama_3(layers: int, width: int, inner: int, **options: bool) -> ModelConfig:
    """Grattafiori et al. 2024, table 3: 8 groups of heads, 128,256 tokens, a base of 500,000."""
    ends = 128000, 128001
    return llama(
        layers,
        width,
        32,
        inner,
        groups=8,
        vocab=128256,
        positions=8192,
        base=500_000.0,
        ends=ends,
        **options,
    )


@register("llama-3-8b")
def llama_3_8b() -> ModelConfig:
    """Llama 3 decoder: 32 layers of 4096, 8.0B parameters (Grattafiori et al. 2024, table 3)."""
    return llama_3(32, 4096, 14336)


@register("llama-3.2-1b")
def llama_3_2_1b() -> ModelConfig:
    """Llama 3.2 decoder: 16 layers of 2048, RoPE extended from 8,192, 1.24B parameters (model card, 2024)."""
    config = llama_3(16, 2048, 8192, tied=True)
    extension = Llama3Config(factor=32.0, original_max_positions=8192)
    config = config.override("position", RopeConfig(base=500_000.0, extension=extension))
    return dataclasses.replace(config, max_position_embeddings=131072)


@register("mistral-7b")
def mistral_7b() -> ModelConfig:
    """Mistral decoder, a window of 4,096 tokens: 32 layers of 4096 (Jiang et al. 2023, table 1)."""
    config = llama(32, 4096, 32, 14336, groups=8, positions=32768)
    return config.override("mechanism", SoftmaxConfig(pattern=Window(4095, 0)))


def qwen2(layers: int, width: int, heads: int, inner: int, groups: int, **options: int) -> ModelConfig:
    """Yang et al. 2024, table 1: biases at queries, keys and values, a base of 1,000,000."""
    config = llama(
        layers,
        width,
        heads,
        inner,
        groups=groups,
        vocab=options.get("vocab", 151936),
        positions=131072,
        base=1_000_000.0,
        eps=1e-6,
        tied=width < 3584,
        ends=(151643, 151643),
    )
    return config.override("decoder.attention.bias", ("query", "key", "value"))


@register("qwen2-0.5b")
def qwen2_05b() -> ModelConfig:
    """Qwen2 decoder, tied: 24 layers of 896, 0.49B parameters (Yang et al. 2024, table 1)."""
    return qwen2(24, 896, 14, 4864, 2)


@register("qwen2-7b")
def qwen2_7b() -> ModelConfig:
    """Qwen2 decoder: 28 layers of 3584, 7.6B parameters (Yang et al. 2024, table 1)."""
    return qwen2(28, 3584, 28, 18944, 4, vocab=152064)


@register("smollm2-135m")
def smollm2_135m() -> ModelConfig:
    """SmolLM2 decoder in Llama's layout: 30 layers of 576, 135M parameters (Ben Allal et al. 2025)."""
    return llama(
        30, 576, 9, 1536, groups=3, vocab=49152, positions=8192, base=100_000.0, tied=True, ends=(0, 0)
    )


@register("smollm2-360m")
def smollm2_360m() -> ModelConfig:
    """SmolLM2 decoder in Llama's layout: 32 layers of 960, 362M parameters (Ben Allal et al. 2025)."""
    return llama(
        32, 960, 15, 2560, groups=5, vocab=49152, positions=8192, base=100_000.0, tied=True, ends=(0, 0)
    )


@register("smollm2-1.7b")
def smollm2_1b() -> ModelConfig:
    """SmolLM2 decoder in Llama's layout: 24 layers of 2048, 1.7B parameters (Ben Allal et al. 2025)."""
    return llama(24, 2048, 32, 8192, vocab=49152, positions=8192, base=130_000.0, tied=True, ends=(0, 0))
