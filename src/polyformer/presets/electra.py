"""ELECTRA's discriminators and generators: BERT's layout, the small ones with narrow token vectors."""

import dataclasses

from polyformer.architecture import ModelConfig
from polyformer.heads import DetectConfig, HeadConfig, MaskedConfig
from polyformer.presets.base import model_config, register, sizes


def electra(
    layers: int, width: int, heads: int, embedding: int, head: HeadConfig | None = None
) -> ModelConfig:
    """A discriminator, or what `head` says. A head of 64, as everywhere in BERT, and BERT's vocabulary."""
    config = model_config("bert-base", {**sizes(layers, width, heads), "pad": 0})
    sum_size = None if embedding == width else embedding
    return dataclasses.replace(
        config, embedding=dataclasses.replace(config.embedding, size=sum_size), head=head or DetectConfig()
    )


@register("electra-small")
def electra_small() -> ModelConfig:
    """Clark et al. 2020, section 3.3: 12 layers of 256 above vectors of 128, 14M parameters."""
    return electra(12, 256, 4, 128)


@register("electra-base")
def electra_base() -> ModelConfig:
    """Clark et al. 2020, table 3: BERT-base's size, 110M parameters."""
    return electra(12, 768, 12, 768)


@register("electra-large")
def electra_large() -> ModelConfig:
    """Clark et al. 2020, table 2: BERT-large's size, 335M parameters."""
    return electra(24, 1024, 16, 1024)


@register("electra-base-generator")
def electra_base_generator() -> ModelConfig:
    """Clark et al. 2020, table 6: 12 layers of 256, a third of the base, above vectors of 768."""
    return electra(12, 256, 4, 768, MaskedConfig())
