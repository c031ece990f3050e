"""Systems with a name for their positions: Shaw et al., RoFormer, ALiBi, DA-Transformer, the character-level
Transformer of Al-Rfou et al., and DeBERTa, which is BERT with disentangled positions.

Deviations. Shaw's base model has vectors for every head, here the heads of a layer share them. The losses of
Al-Rfou et al. at intermediate layers and for further tokens, which add 16M parameters in training, are
missing.
"""

from dataclasses import dataclass

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.positions import DebertaConfig, PositionConfig, RopeConfig, ShawConfig
from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import (
    SizedPreset,
    Variant,
    model_config,
    register_presets,
    size_options,
)

CHARACTERS = {"vocab_size": 256, "position": "learned_per_layer", "activation": "relu", "tied": False}
"""Overrides for the decoders of Al-Rfou et al."""

SMALL_ENCODER = {**size_options(4, 256, 8), "vocab_size": 8000}
"""Overrides for an encoder that a CPU trains."""

register_presets(
    Variant(
        "shaw-transformer",
        "Transformer with Shaw's relative positions, base: 6 + 6 layers of 512 (Shaw et al. 2018, table 1).",
        base="transformer-base",
        changes={"position": ShawConfig(clip=16)},
    ),
    Variant(
        "shaw-transformer-big",
        "Transformer with Shaw's relative positions, big: 6 + 6 layers of 1024 (Shaw et al. 2018, table 1).",
        base="transformer-big",
        changes={"position": ShawConfig(clip=8)},
    ),
    Variant(
        "shaw-transformer-small",
        "Transformer with Shaw's relative positions for a CPU: 3 + 3 layers of 256 (Shaw et al. 2018).",
        base="transformer-small",
        changes={"position": ShawConfig(clip=16)},
    ),
    Variant(
        "roformer",
        "RoFormer encoder of Chinese: 12 layers of 768, 124M parameters (Su et al. 2021, section 4.5).",
        base="bert-base",
        changes={"vocab_size": 50000, "position": RopeConfig(layout="pairs")},
    ),
    Variant(
        "roformer-small",
        "RoFormer encoder for a CPU: 4 layers of 256 (Su et al. 2021).",
        base="bert-base",
        changes={**SMALL_ENCODER, "position": RopeConfig(layout="pairs")},
    ),
    Variant(
        "alibi",
        "ALiBi language model of WikiText-103: 16 layers of 1024, 247M parameters "
        "(Press et al. 2022, section 4.1).",
        base="knn-lm",
        changes={"position": "alibi"},
    ),
    Variant(
        "alibi-1.3b",
        "ALiBi language model: 25 layers of 2048, 1.36B parameters "
        "(Press et al. 2022, section 4.3, says 1.3B).",
        base="decoder-small",
        changes={**size_options(25, 2048, 16), "vocab_size": 50264, "position": "alibi"},
    ),
    Variant(
        "alibi-small",
        "ALiBi language model for a CPU: 4 layers of 256 (Press et al. 2022).",
        base="decoder-small",
        changes={"position": "alibi"},
    ),
    Variant(
        "da-transformer",
        "DA-Transformer classifier for news: one layer of 16 heads of 16 (Wu et al. 2021, section 4.1).",
        base="encoder-small",
        changes={**size_options(1, 256, 16), "vocab_size": 30522, "position": "da", "dropout": 0.2},
    ),
    Variant(
        "da-transformer-small",
        "DA-Transformer classifier for a CPU: 2 layers of 128 (Wu et al. 2021).",
        base="encoder-small",
        changes={"position": "da"},
    ),
    Variant(
        "char-transformer",
        "Character-level Transformer: 64 layers of 512, 219M parameters (Al-Rfou et al. 2019, section 3).",
        base="decoder-small",
        changes={**size_options(64, 512, 2), **CHARACTERS, "dropout": 0.55},
    ),
    Variant(
        "char-transformer-12",
        "Character-level Transformer: 12 layers of 512, 41M parameters (Al-Rfou et al. 2019, section 3).",
        base="decoder-small",
        changes={**size_options(12, 512, 2), **CHARACTERS, "dropout": 0.2},
    ),
    Variant(
        "char-transformer-small",
        "Character-level Transformer for a CPU: 8 layers of 128 (Al-Rfou et al. 2019).",
        base="decoder-tiny",
        changes={**CHARACTERS, "num_hidden_layers": 8},
    ),
)

EPS = 1e-7
"""The epsilon of DeBERTa's norms."""


@dataclass(frozen=True, kw_only=True)
class DebertaPreset(SizedPreset):
    """DeBERTa (He et al. 2021): BERT's layout with disentangled positions and without token types.

    Args:
        bias: the projections with a bias, True for all; those of keys have none in the first version.
    """

    vocabulary: int = 50265
    bias: bool | tuple[str, ...] = ("query", "value", "output")

    def position(self) -> PositionConfig:
        """Return the positions of this version."""
        return DebertaConfig(eps=EPS, dropout=0.1)

    def config(self) -> ModelConfig:
        changes = {
            **size_options(self.layers, self.width, self.heads),
            "vocab_size": self.vocabulary,
            "type_vocab_size": 0,
            "mechanism": SoftmaxConfig(dropout=0.1),
            "encoder.attention.bias": self.bias,
            "eps": EPS,
            "position": self.position(),
        }
        return model_config("bert-base", changes)


register_presets(
    # microsoft/deberta-base
    DebertaPreset(
        "deberta-base",
        "DeBERTa encoder: 12 layers of 768, 100M parameters without tokens (He et al. 2021, table 8).",
        layers=12,
        width=768,
        heads=12,
    ),
)


@dataclass(frozen=True, kw_only=True)
class DebertaV3Preset(DebertaPreset):
    """Versions 2 and 3: logarithmic buckets, and positions share the projections of contents."""

    vocabulary: int = 128100
    bias: bool | tuple[str, ...] = True

    def position(self) -> PositionConfig:
        return DebertaConfig(
            max_relative_positions=512,
            buckets=256,
            share_projections=True,
            norm_embeddings=True,
            eps=EPS,
            dropout=0.1,
        )


register_presets(
    # microsoft/deberta-v3-small, and 98M of token vectors
    DebertaV3Preset(
        "deberta-v3-small",
        "DeBERTa V3 encoder: 6 layers of 768, 44M parameters without tokens (He et al. 2023, table 5).",
        layers=6,
        width=768,
        heads=12,
    ),
    # microsoft/deberta-v3-base, and 98M of token vectors
    DebertaV3Preset(
        "deberta-v3-base",
        "DeBERTa V3 encoder: 12 layers of 768, 86M parameters without tokens (He et al. 2023, table 5).",
        layers=12,
        width=768,
        heads=12,
    ),
)
