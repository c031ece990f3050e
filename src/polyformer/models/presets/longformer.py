"""Longformer: long texts by windows and global tokens. Beltagy et al. 2020."""

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Global, Marked, Pattern, PerHead, PerLayer, Window
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes, size_options


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
    changes = {
        **size_options(layers, width, heads),
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "mechanism": SoftmaxConfig(pattern=pattern, dropout=0.1),
        "global_projections": True,
    }
    return model_config("roberta-base", changes)


@register_sizes(
    "Longformer decoder for a CPU: {layers} layers of {width} with causal windows "
    "(Beltagy et al. 2020, section 4.1).",
    DECODERS,
)
def longformer_decoder(layers: int, width: int, heads: int, vocab: int, pattern: Pattern) -> ModelConfig:
    """Return a pre-norm decoder with sinusoids."""
    changes = {
        **size_options(layers, width, heads),
        "vocab_size": vocab,
        "attention": pattern,
        "position": "sinusoidal",
        "activation": "gelu",
        "embedding.scaled": False,  # later defaults would change the results of earlier runs
    }
    return model_config("decoder-small", changes)
