"""Longformer: long texts by windows and global tokens. Beltagy et al. 2020."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Global, Marked, Pattern, PerHead, PerLayer, Window
from polyformer.attention.positions import LearnedConfig, SinusoidalConfig
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.models.presets.base import register
from polyformer.nn.block import PreNormConfig
from polyformer.nn.feedforward import DenseConfig
from polyformer.nn.heads import MaskedConfig
from polyformer.nn.stack import AttentionConfig, EmbeddingConfig, StackConfig


def longformer(
    layers: int, width: int, heads: int, vocab: int, positions: int, pattern: Pattern
) -> ModelConfig:
    """RoBERTa with `pattern` instead of full attention and projections of their own for global tokens."""
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


@register("longformer-base")
def longformer_base() -> ModelConfig:
    """Longformer encoder: RoBERTa-base with windows of 512, 4096 tokens (Beltagy et al. 2020, section 5).

    The published allenai/longformer-base-4096, 149M parameters. Global tokens are those that
    `global_attention_mask` marks; `marks_first` of the head `classify` marks the first one by itself.
    """
    return longformer(12, 768, 12, 50265, 4096, Window(256) | Marked())


@register("longformer-tiny")
def longformer_tiny() -> ModelConfig:
    """Longformer encoder for tests: two layers of 32 with different windows.

    As in section 4.1 of Beltagy et al. 2020.
    """
    pattern = PerLayer((Window(2) | Global(1) | Marked(), Window(4) | Global(1) | Marked()))
    return longformer(2, 32, 2, 300, 64, pattern)


def dilated(reach: int, dilation: int) -> Pattern:
    """The last `reach` + 1 tokens; two of eight heads see as many `dilation` times as far."""
    near, far = Window(reach, 0), Window(reach, 0, dilation)
    return PerHead((far, far, *[near] * 6))


@register("longformer-decoder-small")
def longformer_decoder_small() -> ModelConfig:
    """Longformer decoder for a CPU: 4 layers of 256 with causal windows (Beltagy et al. 2020, section 4.1).

    Windows grow from the bottom layer to the top, and in the upper half two heads are dilated. Pre-norm and
    sinusoids at the input, where the paper has Transformer-XL's positions.
    """
    pattern = PerLayer((Window(31, 0), Window(63, 0), dilated(127, 2), dilated(127, 3)))
    return ModelConfig(
        vocab_size=8000,
        hidden_size=256,
        embedding=EmbeddingConfig(scaled=False),  # as runs of this preset began
        decoder=StackConfig(
            num_hidden_layers=4,
            attention=AttentionConfig(num_attention_heads=8, mechanism=SoftmaxConfig(pattern=pattern)),
            feedforward=DenseConfig(intermediate_size=1024, activation="gelu"),
            position=SinusoidalConfig(),
            block=PreNormConfig(),
        ),
        initializer_range=0.02,
    )
