"""BigBird: a window of blocks, random blocks and global tokens; encoders, and summarizers of long texts.

Seeds differ from layer to layer, so that layers join other blocks, and are the same for every length.
"""

import dataclasses

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import BlockWindow, Global, GlobalEnd, Pattern, PerLayer, Random, Whole
from polyformer.attention.positions import EtcLabelsConfig, LearnedConfig, PositionConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import model_config, register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import LanguageModelConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

LAYERS = 12


def bigbird_pattern(layers: int, block: int, random: int) -> Pattern:
    """Return the ITC form; texts shorter than all its blocks together use full attention."""
    whole = Whole((5 + 2 * random) * block)
    fixed = whole | BlockWindow(block) | Global(block) | GlobalEnd(block)
    return PerLayer(tuple(fixed | Random(random, block, seed=layer) for layer in range(layers)))


def etc_pattern(layers: int, block: int, random: int) -> Pattern:
    """Return the ETC form: a window and random blocks of long tokens, with 256 global tokens."""
    fixed = BlockWindow(block) | Global(256)
    return PerLayer(tuple(fixed | Random(random, block, seed=layer) for layer in range(layers)))


SIZES = {
    # google/bigbird-roberta-base. Blocks of 64; the first and the last block are global, a window of three,
    # and three random blocks, which see each other here and in one direction only there. Texts of at most 704
    # tokens use full attention, as there.
    "bigbird-base": ((bigbird_pattern(LAYERS, 64, 3), LearnedConfig()), "ITC form, for 4096 tokens"),
    # Blocks of 84 and a window of three; positions are ETC's labels.
    "bigbird-etc-base": (
        (etc_pattern(LAYERS, 84, 3), EtcLabelsConfig(global_tokens=256, max_distance=12)),
        "ETC form, 256 global tokens",
    ),
}
SUMMARIZERS = {  # layers, width, heads, vocabulary, block, random blocks
    # google/bigbird-pegasus-large-arxiv, -pubmed and -bigpatent
    "bigbird-pegasus-large": ((16, 1024, 16, 96103, 64, 3), "577M parameters"),
    "bigbird-pegasus-small": ((2, 256, 4, 8000, 16, 2), "for a CPU"),
}


@register_sizes("BigBird encoder, {}: 12 layers of 768 (Zaheer et al. 2020, appendix E.1).", SIZES)
def bigbird(pattern: Pattern, position: PositionConfig) -> ModelConfig:
    """Return RoBERTa's sizes with the vocabulary of google/bigbird-roberta-base, for 4096 tokens."""
    changes = {
        "vocab_size": 50358,
        "max_position_embeddings": 4096,
        "attention": pattern,
        "position": position,
        "activation": "gelu_tanh",
        "embedding.scaled": False,
    }
    return model_config("bert-base", changes)


@register_sizes(
    "BigBird-Pegasus summarizer, {layers} + {layers} layers of {width}, {} (Zaheer et al. 2020).",
    SUMMARIZERS,
)
def bigbird_pegasus(layers: int, width: int, heads: int, vocab: int, block: int, random: int) -> ModelConfig:
    """Return Pegasus' pre-norm layers with learned positions, BigBird's pattern in the encoder."""
    decoder = StackConfig(
        num_hidden_layers=layers,
        attention=AttentionConfig(num_attention_heads=heads, bias=False),
        feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu_tanh"),
        position=LearnedConfig(),
        block=PreNormConfig(),
    )
    mechanism = SoftmaxConfig(pattern=bigbird_pattern(layers, block, random))
    attention = dataclasses.replace(decoder.attention, mechanism=mechanism)
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=4096,
        embedding=EmbeddingConfig(scaled=True),
        encoder=dataclasses.replace(decoder, attention=attention, block=PreNormConfig(finite=True)),
        decoder=decoder,
        head=LanguageModelConfig(bias=True, frozen_bias=True),
        special=SpecialTokens(pad=0, bos=2, eos=1),
        initializer_range=0.02,
    )
