"""ETC: global and long tokens in one row, with relative labels and no absolute positions.

Rows come from `polyformer.data.rows.structured`, which needs the model's number of global tokens.
"""

from polyformer.attention.patterns import ETC
from polyformer.attention.positions import EtcLabelsConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes, size_options

SIZES = {  # layers, width, heads, vocabulary, pattern, largest distance of a label
    # The released models of this size have an output projection for each of both parts, and 16 token types.
    "etc-base": (
        (12, 768, 12, 30522, ETC(256, 84, hard_g2l=True), 12),
        "4096 tokens and 256 global ones: 12 layers of 768 (Ainslie et al. 2020, section 4)",
    ),
    "etc-tiny": ((2, 32, 2, 300, ETC(8, 4, hard_g2l=True), 3), "tests: 2 layers of 32 and 8 global tokens"),
}


@register_sizes("ETC encoder for {}.", SIZES)
def etc(layers: int, width: int, heads: int, vocab: int, pattern: ETC, max_distance: int) -> ModelConfig:
    """Return a post-norm encoder as BERT, with the token types global (0) and long (1)."""
    changes = {
        **size_options(layers, width, heads),
        "vocab_size": vocab,
        "attention": pattern,
        "position": EtcLabelsConfig(global_tokens=pattern.global_tokens, max_distance=max_distance),
    }
    return model_config("bert-base", changes)
