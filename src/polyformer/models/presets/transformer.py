"""The encoder-decoder of 2017. Vaswani et al. 2017, table 3."""

import dataclasses

from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def encoder_decoder(
    layers: int, width: int, heads: int, intermediate: int, dropout: float, vocab: int
) -> ModelConfig:
    """Equal stacks, post-norm, sinusoids, one token table in all three places."""
    stack = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(num_attention_heads=heads),
        feedforward=DenseConfig(intermediate_size=intermediate),
        dropout=dropout,
    )
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        embedding=EmbeddingConfig(scaled=True),
        encoder=stack,
        decoder=stack,
        head=LanguageModelConfig(label_smoothing=0.1),
        special=SpecialTokens(pad=0, bos=1, eos=2),
    )


@register("transformer-base")
def transformer_base() -> ModelConfig:
    """The Transformer of 2017, base: 6 + 6 layers of 512 (Vaswani et al. 2017, table 3: 65M parameters).

    About 37000 shared tokens.
    """
    return encoder_decoder(6, 512, 8, 2048, 0.1, vocab=37000)


@register("transformer-big")
def transformer_big() -> ModelConfig:
    """The Transformer of 2017, big: 6 + 6 layers of 1024 (Vaswani et al. 2017, table 3: 213M parameters)."""
    return encoder_decoder(6, 1024, 16, 4096, 0.3, vocab=37000)


@register("transformer-small")
def transformer_small() -> ModelConfig:
    """Encoder-decoder for a CPU: 3 + 3 layers of 256, pre-norm, which trains without warm-up.

    For Multi30k, say.
    """
    config = encoder_decoder(3, 256, 4, 1024, 0.1, vocab=8000)
    return config.override("block", "pre")


@register("transformer-tiny")
def transformer_tiny() -> ModelConfig:
    """Encoder-decoder for tests: one layer of each."""
    return dataclasses.replace(encoder_decoder(1, 32, 4, 64, 0.1, vocab=300), max_position_embeddings=128)
