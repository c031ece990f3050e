"""Systems with a name for their positions: Shaw et al., RoFormer, ALiBi, DA-Transformer, and the
character-level Transformer of Al-Rfou et al.

Deviations. Shaw's base model has vectors for every head, here the heads of a layer share them. The losses of
Al-Rfou et al. at intermediate layers and for further tokens, which add 16M parameters in training, are
missing.
"""

from polyformer.attention.positions import RopeConfig, ShawConfig
from polyformer.models.presets.base import register_variants, size_options

CHARACTERS = {"vocab_size": 256, "position": "learned_per_layer", "activation": "relu", "tied": False}
SMALL_ENCODER = {**size_options(4, 256, 8), "vocab_size": 8000}

SHAW = {
    "shaw-transformer": (
        "transformer-base",
        {"position": ShawConfig(clip=16)},
        ", base: 6 + 6 layers of 512",
        ", table 1",
    ),
    "shaw-transformer-big": (
        "transformer-big",
        {"position": ShawConfig(clip=8)},
        ", big: 6 + 6 layers of 1024",
        ", table 1",
    ),
    "shaw-transformer-small": (
        "transformer-small",
        {"position": ShawConfig(clip=16)},
        " for a CPU: 3 + 3 layers of 256",
    ),
}
ROFORMER = {
    "roformer": (
        "bert-base",
        {"vocab_size": 50000, "position": RopeConfig(layout="pairs")},
        "encoder of Chinese: 12 layers of 768, 124M parameters",
        ", section 4.5",
    ),
    "roformer-small": (
        "bert-base",
        {**SMALL_ENCODER, "position": RopeConfig(layout="pairs")},
        "encoder for a CPU: 4 layers of 256",
    ),
}
ALIBI = {
    "alibi": (
        "knn-lm",
        {"position": "alibi"},
        " of WikiText-103: 16 layers of 1024, 247M parameters",
        ", section 4.1",
    ),
    "alibi-1.3b": (
        "decoder-small",
        {**size_options(25, 2048, 16), "vocab_size": 50264, "position": "alibi"},
        ": 25 layers of 2048, 1.36B parameters",
        ", section 4.3, says 1.3B",
    ),
    "alibi-small": ("decoder-small", {"position": "alibi"}, " for a CPU: 4 layers of 256"),
}
DA = {
    "da-transformer": (
        "encoder-small",
        {**size_options(1, 256, 16), "vocab_size": 30522, "position": "da", "dropout": 0.2},
        "for news: one layer of 16 heads of 16",
        ", section 4.1",
    ),
    "da-transformer-small": ("encoder-small", {"position": "da"}, "for a CPU: 2 layers of 128"),
}
CHARACTER = {
    "char-transformer": (
        "decoder-small",
        {**size_options(64, 512, 2), **CHARACTERS, "dropout": 0.55},
        ": 64 layers of 512, 219M parameters",
        ", section 3",
    ),
    "char-transformer-12": (
        "decoder-small",
        {**size_options(12, 512, 2), **CHARACTERS, "dropout": 0.2},
        ": 12 layers of 512, 41M parameters",
        ", section 3",
    ),
    "char-transformer-small": (
        "decoder-tiny",
        {**CHARACTERS, "num_hidden_layers": 8},
        " for a CPU: 8 layers of 128",
    ),
}

register_variants("Transformer with Shaw's relative positions{} (Shaw et al. 2018{}).", SHAW)
register_variants("RoFormer {} (Su et al. 2021{}).", ROFORMER)
register_variants("ALiBi language model{} (Press et al. 2022{}).", ALIBI)
register_variants("DA-Transformer classifier {} (Wu et al. 2021{}).", DA)
register_variants("Character-level Transformer{} (Al-Rfou et al. 2019{}).", CHARACTER)
