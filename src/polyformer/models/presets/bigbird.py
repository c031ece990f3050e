"""BigBird: a window of blocks, random blocks and global tokens.

Seeds differ from layer to layer, so that layers join other blocks, and are the same for every length.
"""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import BlockWindow, Global, GlobalEnd, Pattern, PerLayer, Random, Whole
from polyformer.attention.positions import EtcLabelsConfig, LearnedConfig, PositionConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import register
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig

LAYERS = 12


def bigbird(pattern: Pattern, position: PositionConfig, positions: int) -> ModelConfig:
    """RoBERTa's sizes with the vocabulary of google/bigbird-roberta-base."""
    return ModelConfig(
        vocab_size=50358,
        hidden_size=768,
        max_position_embeddings=positions,
        embedding=EmbeddingConfig(scaled=False, normed=True, type_vocab_size=2),
        encoder=StackConfig(
            num_hidden_layers=LAYERS,
            attention=AttentionConfig(num_attention_heads=12, mechanism=SoftmaxConfig(pattern=pattern)),
            feedforward=DenseConfig(intermediate_size=3072, activation="gelu_tanh"),
            position=position,
            norm=LayerNormConfig(eps=1e-12),
        ),
        head=MaskedConfig(activation="gelu_tanh"),
        initializer_range=0.02,
    )


@register("bigbird-base")
def bigbird_base() -> ModelConfig:
    """BigBird encoder, ITC form, for 4096 tokens: 12 layers of 768 (Zaheer et al. 2020, appendix E.1).

    The released checkpoint is google/bigbird-roberta-base. Blocks of 64; the first and the last block are
    global, a window of three, and three random blocks, which see one another here and not on one side only.
    Texts of at most 704 tokens are seen whole, as there.
    """
    return bigbird(bigbird_pattern(LAYERS, 64, 3), LearnedConfig(), 4096)


def bigbird_pattern(layers: int, block: int, random: int) -> Pattern:
    """The ITC form for so many layers; shorter texts than all its blocks together are seen whole."""
    whole = Whole((5 + 2 * random) * block)
    fixed = whole | BlockWindow(block) | Global(block) | GlobalEnd(block)
    return PerLayer(tuple(fixed | Random(random, block, seed=layer) for layer in range(layers)))


@register("bigbird-etc-base")
def bigbird_etc_base() -> ModelConfig:
    """BigBird encoder, ETC form, 256 global tokens: 12 layers of 768 (Zaheer et al. 2020, appendix E.1).

    Blocks of 84 and a window of three, with random blocks as in the general form; positions are ETC's labels.
    Rows are those of `polyformer.data.structured`.
    """
    labels = EtcLabelsConfig(global_tokens=256, max_distance=12)
    layers = (BlockWindow(84) | Global(256) | Random(3, 84, seed=layer) for layer in range(LAYERS))
    return bigbird(PerLayer(tuple(layers)), labels, 4096)
