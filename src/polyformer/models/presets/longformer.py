"""Longformer: long texts by windows and global tokens. Beltagy et al. 2020."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Global, Marked, Pattern, PerHead, PerLayer, Window
from polyformer.attention.positions import LearnedConfig, SinusoidalConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register_sizes
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def dilated(reach: int, dilation: int) -> Pattern:
    """Return a window over the last `reach` + 1 tokens; two of eight heads are dilated."""
    near, far = Window(reach, 0), Window(reach, 0, dilation)
    return PerHead((far, far, *[near] * 6))


GROWING = PerLayer((Window(2) | Global(1) | Marked(), Window(4) | Global(1) | Marked()))
ENCODERS = {  # layers, width, heads, vocabulary, positions, pattern
    # allenai/longformer-base-4096, 149M parameters. `global_attention_mask` marks the global tokens; with
    # `marks_first` the head `classify` marks the first token.
    "longformer-base": (
        (12, 768, 12, 50265, 4096, Window(256) | Marked()),
        ": RoBERTa-base with windows of 512, 4096 tokens (Beltagy et al. 2020, section 5)",
    ),
    "longformer-tiny": ((2, 32, 2, 300, 64, GROWING), " for tests: two layers of 32 with different windows"),
}
# Windows grow from the bottom layer to the top, and in the upper half two heads are dilated. Positions are
# sinusoids at the input; the paper uses Transformer-XL's.
DILATED = PerLayer((Window(31, 0), Window(63, 0), dilated(127, 2), dilated(127, 3)))
DECODERS = {"longformer-decoder-small": ((4, 256, 8, 8000, DILATED),)}


@register_sizes("Longformer encoder{}.", ENCODERS)
def longformer(
    layers: int, width: int, heads: int, vocab: int, positions: int, pattern: Pattern
) -> ModelConfig:
    """Return RoBERTa with `pattern` instead of full attention and separate projections for global tokens."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        max_position_embeddings=positions,
        embedding=EmbeddingConfig(normed=True, type_vocab_size=1),
        encoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(
                num_attention_heads=heads,
                mechanism=SoftmaxConfig(pattern=pattern, dropout=0.1),
                global_projections=True,
            ),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu"),
            position=LearnedConfig(offset=2),
            norm=LayerNormConfig(eps=1e-5),
        ),
        head=MaskedConfig(eps=1e-5),
        special=SpecialTokens(pad=1, bos=0, eos=2),
        initializer_range=0.02,
    )


@register_sizes(
    "Longformer decoder for a CPU: {layers} layers of {width} with causal windows "
    "(Beltagy et al. 2020, section 4.1).",
    DECODERS,
)
def longformer_decoder(layers: int, width: int, heads: int, vocab: int, pattern: Pattern) -> ModelConfig:
    """Return a pre-norm decoder with sinusoids."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        embedding=EmbeddingConfig(scaled=False),  # later defaults would change the results of earlier runs
        decoder=StackConfig(
            num_hidden_layers=layers,
            attention=AttentionConfig(num_attention_heads=heads, mechanism=SoftmaxConfig(pattern=pattern)),
            feedforward=DenseConfig(intermediate_size=4 * width, activation="gelu"),
            position=SinusoidalConfig(),
            block=PreNormConfig(),
        ),
        initializer_range=0.02,
    )
