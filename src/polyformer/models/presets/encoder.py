"""Encoders: for classification, tagging, question answering, embedding; and BertSum's with its decoder."""

import dataclasses

from polyformer.attention.positions import LearnedConfig, SinusoidalConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import ClassifyConfig, LanguageModelConfig, MaskedConfig, TagConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

BERT = {
    "bert-base": ((12, 768, 12), ", 110M parameters", ""),
    "bert-large": ((24, 1024, 16), "", ": 340M parameters"),
}
CLASSIFIERS = {  # layers, width, heads, vocabulary, positions
    "encoder-small": ((2, 128, 4, 8000, 512), "a CPU: an encoder with 2 layers of 128"),
    "encoder-tiny": ((1, 32, 2, 300, 64), "tests: an encoder with one layer of 32"),
}


BERTSUM = {  # layers, width, heads, vocabulary
    "bertsum": ((12, 768, 12, 30522), "12 layers of 768", ", section 2"),
    "bertsum-small": ((4, 256, 8, 8000), "for a CPU: 4 layers of 256", ""),
}
BERTSUM_ABS = {  # the same, and the decoder's layers, heads and inner width
    "bertsum-abs": ((12, 768, 12, 30522, 6, 8, 2048), "", "s 3.2 and 4.2"),
    "bertsum-abs-small": ((4, 256, 8, 8000, 2, 4, 512), "for a CPU, ", " 3.2"),
}


@register_sizes(
    "BERT encoder for masked tokens: {layers} layers of {width}{} (Devlin et al. 2019, section 3{}).", BERT
)
def bert(layers: int, width: int, heads: int) -> ModelConfig:
    """Return BERT's layout: post-norm, learned positions, a norm after the embedding sum, a masked head."""
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


@register_sizes("BertSum extractive summarizer, {} (Liu 2019{}).", BERTSUM)
def bertsum(layers: int, width: int, heads: int, vocab: int) -> ModelConfig:
    """Return BERT with a score for each token; BertSum reads the scores of the first tokens of sentences."""
    config = bert(layers, width, heads)
    return dataclasses.replace(config, vocab_size=vocab, head=TagConfig(num_labels=2))


@register_sizes(
    "BertSum abstractive summarizer, {}{layers} + {decoder_layers} layers of {width} "
    "(Liu and Lapata 2019, section{}).",
    BERTSUM_ABS,
)
def bertsum_abs(
    layers: int, width: int, heads: int, vocab: int, *, decoder_layers: int, decoder_heads: int, inner: int
) -> ModelConfig:
    """Return BERT with a decoder that has its own token table, tied to the output layer.

    Deviations: the decoder's embedding sum has a norm and the vector of token type 0 too, because both stacks
    have the same terms. Training has a single optimizer: separate learning rates and warm-ups of the encoder
    and the decoder (equations 6 and 7) are missing.
    """
    config = bert(layers, width, heads)
    decoder = StackConfig(
        num_hidden_layers=decoder_layers,
        attention=AttentionConfig(num_attention_heads=decoder_heads),
        feedforward=DenseConfig(intermediate_size=inner, activation="gelu"),
        position=SinusoidalConfig(),
        block=PreNormConfig(),
    )
    return dataclasses.replace(
        config,
        vocab_size=vocab,
        embedding=dataclasses.replace(config.embedding, shared=False),
        decoder=decoder,
        head=LanguageModelConfig(),
        special=SpecialTokens(pad=0, bos=1, eos=2),  # [PAD], and the first unused tokens of BERT's vocabulary
    )


@register_sizes("Text classifier for {}.", CLASSIFIERS)
def encoder(layers: int, width: int, heads: int, vocab: int, positions: int) -> ModelConfig:
    """Return a pre-norm encoder with learned positions and a classification head."""
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
