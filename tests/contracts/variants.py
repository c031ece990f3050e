"""Options that belong to no member, as changes of a model's configuration."""

import dataclasses
from collections.abc import Callable
from typing import Any

from polyformer.attention.mechanisms import SoftmaxConfig, SSDConfig
from polyformer.attention.patterns import Global, Window
from polyformer.attention.positions import PositionConfig, RopeConfig
from polyformer.core.config import Config
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import AdaptiveSoftmaxConfig
from polyformer.nn.stack import AdaptiveConfig, AttentionConfig, BesideConfig, EmbeddingConfig

Family = type[Config]

GROUPED = {"num_key_value_heads": 1, "bias": False, "qk_norm": "rms"}
LATENT = {
    "bias": ["key", "output"],
    "latent": {"size": 8, "query_size": 10, "rotary_size": 4, "value_size": 5},
}
"""A text is computed in the explicit form, and steps of decoding in the absorbed form."""

INDEXER = {"indexer": {"top_k": 4, "heads": 8}}

BESIDE = {"bias": True, "input_scales": (0.5, 1.5), "output_scales": (2.0, 0.75)}


def replaced(config: Any, family: Family, function: Callable[[Any], Config]) -> Any:
    """`config` with `function` applied to every part of `family` in its tree."""
    changes = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, family):
            changes[field.name] = function(value)
        elif isinstance(value, Config):
            changes[field.name] = replaced(value, family, function)
    return dataclasses.replace(config, **changes)


VARIANTS: dict[str, Callable[[ModelConfig], ModelConfig]] = {
    "grouped": lambda base: replaced(
        base, AttentionConfig, lambda config: AttentionConfig.from_dict(config.to_dict() | GROUPED)
    ),
    "value residual": lambda base: replaced(
        base, AttentionConfig, lambda config: dataclasses.replace(config, value_residual=True)
    ),
    "beside": lambda base: replaced(
        base,
        AttentionConfig,
        lambda config: dataclasses.replace(
            config, mechanism=SSDConfig(short_convolution=3), beside=BesideConfig(**BESIDE)
        ),
    ),
    "latent": lambda base: replaced(
        replaced(base, PositionConfig, lambda _: RopeConfig()),
        AttentionConfig,
        lambda config: AttentionConfig.from_dict(config.to_dict() | LATENT),
    ),
    "indexer": lambda base: replaced(
        replaced(base, PositionConfig, lambda _: RopeConfig()),
        AttentionConfig,
        lambda config: AttentionConfig.from_dict(config.to_dict() | INDEXER),
    ),
    "indexed latent": lambda base: replaced(
        replaced(base, PositionConfig, lambda _: RopeConfig()),
        AttentionConfig,
        lambda config: AttentionConfig.from_dict(config.to_dict() | LATENT | INDEXER),
    ),
    "global": lambda base: replaced(
        base,
        AttentionConfig,
        lambda config: dataclasses.replace(
            config, mechanism=SoftmaxConfig(pattern=Window(2) | Global(2)), global_projections=True
        ),
    ),
    "embedding": lambda base: replaced(
        base,
        EmbeddingConfig,
        lambda config: EmbeddingConfig(scaled=True, normed=True, type_vocab_size=2, shared=False, tied=False),
    ),
    "adaptive": lambda base: dataclasses.replace(
        base,
        embedding=EmbeddingConfig(scaled=True, adaptive=AdaptiveConfig(cutoffs=(7, 11), div_val=2)),
        head=AdaptiveSoftmaxConfig(),
    ),
}
"""Options that belong to no member."""
