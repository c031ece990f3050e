"""Encoders: for classification, tagging, question answering, embedding."""

from polyformer.attention.positions import LearnedConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import ClassifyConfig, MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def bert(layers: int, width: int, heads: int) -> ModelConfig:
    """BERT's layout: post-norm, learned positions, a norm after the embedding sum, masked language model."""
    return ModelConfig(
        vocab_size=30522,
        hidden_size=width,
        embedding=EmbeddingConfig(normed=True, type_vocab_size=2),
        encoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(num_attention_heads=heads),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu"),
            position=LearnedConfig(),
            norm=LayerNormConfig(eps=1e-12),
        ),
        head=MaskedConfig(),
        initializer_range=0.02,
    )


@register("bert-base")
def bert_base() -> ModelConfig:
    """BERT encoder for masked tokens: 12 layers of 768, 110M parameters (Devlin et al. 2019, section 3)."""
    return bert(12, 768, 12)


@register("bert-large")
def bert_large() -> ModelConfig:
    """BERT encoder for masked tokens: 24 layers of 1024 (Devlin et al. 2019, section 3: 340M parameters)."""
    return bert(24, 1024, 16)


def encoder(layers: int, width: int, heads: int, vocab: int, positions: int) -> ModelConfig:
    """Pre-norm with learned positions and a classification head."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=positions,
        encoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(num_attention_heads=heads),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu"),
            position=LearnedConfig(),
            block=PreNormConfig(),
        ),
        head=ClassifyConfig(pooling="mean", hidden=False),
        initializer_range=0.02,
    )


@register("encoder-small")
def encoder_small() -> ModelConfig:
    """Text classifier for a CPU: an encoder with 2 layers of 128."""
    return encoder(2, 128, 4, vocab=8000, positions=512)


@register("encoder-tiny")
def encoder_tiny() -> ModelConfig:
    """Text classifier for tests: an encoder with one layer of 32."""
    return encoder(1, 32, 2, vocab=300, positions=64)
