"""Llama and the decoders of its layout: Mistral, Qwen2 and Qwen3, SmolLM, Phi-3, OLMo 2.

Pre-norm with RMS norms, rotary positions, SwiGLU, no biases and no dropout; later sizes share keys and values
among groups of heads. Touvron et al. 2023 (two papers), Grattafiori et al. 2024, Jiang et al. 2023,
Yang et al. 2024, Yang et al. 2025, Ben Allal et al. 2025, Abdin et al. 2024, OLMo Team 2024.
"""

import dataclasses

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Window
from polyformer.attention.positions import RopeConfig
from polyformer.attention.positions.rope_extensions import Llama3Config
from polyformer.core.ops.norms import RMSNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig, SandwichConfig
from polyformer.nn.feedforward import GatedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

LLAMA = {  # layers, width, heads, inner width, key-value heads, positions, epsilon of the norms
    "llama-7b": (
        (32, 4096, 32, 11008, 32, 2048, 1e-6),
        "LLaMA decoder, the first version",
        "6.7B parameters",
        2,
    ),
    "llama-2-7b": ((32, 4096, 32, 11008, 32), "Llama 2 decoder, 4096 tokens", "6.7B parameters", 1),
    "llama-2-70b": ((80, 8192, 64, 28672, 8), "Llama 2 decoder", "69B parameters, grouped heads", 1),
}
LLAMA_3 = {  # layers, width, heads, inner width, key-value heads, tied, extended
    "llama-3-8b": (
        (32, 4096, 32, 14336, 8),
        "Llama 3 decoder: 32 layers of 4096, 8.0B parameters (Grattafiori et al. 2024, table 3)",
    ),
    "llama-3.2-1b": (
        (16, 2048, 32, 8192, 8, True, True),
        "Llama 3.2 decoder: 16 layers of 2048, RoPE extended from 8,192, 1.24B parameters (model card, 2024)",
    ),
}
MISTRAL = {"mistral-7b": ((32, 4096, 32, 14336, 8),)}
QWEN2 = {  # layers, width, heads, inner width, key-value heads, vocabulary, tied
    "qwen2-0.5b": ((24, 896, 14, 4864, 2, 151936, True), ", tied", "0.49B"),
    "qwen2-7b": ((28, 3584, 28, 18944, 4, 152064, False), "", "7.6B"),
}
OLMO_2 = {"olmo-2-1b": ((16, 2048, 16, 8192, 16, 100352, 1e-6),)}
PHI_3 = {"phi-3-mini": ((32, 3072, 32, 8192, 32),)}
QWEN3 = {"qwen3-0.6b": ((28, 1024, 16, 3072, 8, True),)}
SMOLLM2 = {  # layers, width, heads, inner width, key-value heads, base
    "smollm2-135m": ((30, 576, 9, 1536, 3, 100_000.0), "135M"),
    "smollm2-360m": ((32, 960, 15, 2560, 5, 100_000.0), "362M"),
    "smollm2-1.7b": ((24, 2048, 32, 8192, 32, 130_000.0), "1.7B"),
}


@register_sizes("{}: {layers} layers of {width}, {} (Touvron et al. 2023, table {}).", LLAMA)
def llama(
    layers: int,
    width: int,
    heads: int,
    inner: int,
    groups: int,
    positions: int = 4096,
    *,
    eps: float = 1e-5,
    vocab: int = 32000,
    base: float = 10000.0,
    tied: bool = False,
    ends: tuple[int, int] = (1, 2),
) -> ModelConfig:
    """Return Llama 2's layout; `groups`: key-value heads; `ends`: ids of the begin and end of a text."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=positions,
        embedding=EmbeddingConfig(tied=tied),
        decoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(num_attention_heads=heads, num_key_value_heads=groups, bias=False),
            feedforward=GatedConfig(intermediate_size=inner),
            position=RopeConfig(base=base),
            block=PreNormConfig(),
            norm=RMSNormConfig(eps=eps),
            dropout=0.0,
        ),
        special=SpecialTokens(bos=ends[0], eos=ends[1]),
        initializer_range=0.02,
    )


@register_sizes("{}.", LLAMA_3)
def llama_3(
    layers: int,
    width: int,
    heads: int,
    inner: int,
    groups: int,
    *,
    tied: bool = False,
    extended: bool = False,
) -> ModelConfig:
    """Return Llama 3's layout: 128,256 tokens, a base of 500,000.

    `extended`: positions up to 131,072, as in version 3.2.
    """
    positions, ends = 131072 if extended else 8192, (128000, 128001)
    config = llama(layers, width, heads, inner, groups, positions, vocab=128256, tied=tied, ends=ends)
    extension = Llama3Config(factor=32.0, original_max_positions=8192) if extended else None
    return config.override("position", RopeConfig(base=500_000.0, extension=extension))


@register_sizes(
    "Mistral decoder, a window of 4,096 tokens: {layers} layers of {width} (Jiang et al. 2023, table 1).",
    MISTRAL,
)
def mistral(layers: int, width: int, heads: int, inner: int, groups: int) -> ModelConfig:
    """Return Llama's layout with sliding-window attention."""
    config = llama(layers, width, heads, inner, groups, 32768)
    return config.override("mechanism", SoftmaxConfig(pattern=Window(4095, 0)))


@register_sizes("Phi-3 decoder: {layers} layers of {width}, 3.8B parameters (Abdin et al. 2024).", PHI_3)
def phi_3(layers: int, width: int, heads: int, inner: int, groups: int) -> ModelConfig:
    """Return Llama's layout for texts of 4,096 tokens."""
    return llama(layers, width, heads, inner, groups, vocab=32064, ends=(1, 32000))


@register_sizes(
    "Qwen2 decoder{}: {layers} layers of {width}, {} parameters (Yang et al. 2024, table 1).", QWEN2
)
def qwen2(
    layers: int, width: int, heads: int, inner: int, groups: int, *, vocab: int, tied: bool
) -> ModelConfig:
    """Return Llama's layout with biases of queries, keys and values, and a base of 1,000,000."""
    options = {"eps": 1e-6, "vocab": vocab, "base": 1_000_000.0, "tied": tied, "ends": (151643, 151643)}
    config = llama(layers, width, heads, inner, groups, 131072, **options)
    return config.override("decoder.attention.bias", ("query", "key", "value"))


@register_sizes(
    "SmolLM2 decoder in Llama's layout: {layers} layers of {width}, {} parameters (Ben Allal et al. 2025).",
    SMOLLM2,
)
def smollm2(layers: int, width: int, heads: int, inner: int, groups: int, base: float) -> ModelConfig:
    """Return Llama's layout with tied embeddings and a vocabulary of 49152 tokens."""
    options = {"vocab": 49152, "base": base, "tied": True, "ends": (0, 0)}
    return llama(layers, width, heads, inner, groups, 8192, **options)


@register_sizes(
    "OLMo 2 decoder: {layers} layers of {width}, 1.5B parameters (OLMo Team 2024, section 2).", OLMO_2
)
def olmo_2(
    layers: int, width: int, heads: int, inner: int, groups: int, *, vocab: int, eps: float
) -> ModelConfig:
    """Return Llama's layout with norms after sub-layers and of whole projections of queries and keys."""
    config = llama(layers, width, heads, inner, groups, 4096, eps=eps, vocab=vocab, base=500_000.0)
    config = config.override("block", SandwichConfig(input_norm=False))
    config = config.override("decoder.attention.qk_norm_of", "projection")
    config = config.override("decoder.attention.qk_norm", RMSNormConfig(eps=eps))
    return dataclasses.replace(config, special=SpecialTokens(pad=100277, eos=100257))


@register_sizes(
    "Qwen3 decoder: {layers} layers of {width}, 0.6B parameters (Yang et al. 2025, table 1).", QWEN3
)
def qwen3(layers: int, width: int, heads: int, inner: int, groups: int, tied: bool) -> ModelConfig:
    """Return Llama's layout with heads of 128 channels, and norms of their queries and keys."""
    options = {"eps": 1e-6, "vocab": 151936, "base": 1_000_000.0, "tied": tied, "ends": (151643, 151645)}
    config = llama(layers, width, heads, inner, groups, 40960, **options)
    config = config.override("decoder.attention.qk_norm", RMSNormConfig(eps=1e-6))
    return config.override("decoder.attention.head_size", 128)
