"""ELECTRA's discriminators and generators: BERT's layout, the small ones with narrow token vectors."""

import dataclasses

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register, sizes
from polyformer.nn.heads import DetectConfig, HeadConfig, MaskedConfig


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
    """ELECTRA discriminator: 12 layers of 256, 14M parameters (Clark et al. 2020, section 3.3).

    Above token vectors of 128.
    """
    return electra(12, 256, 4, 128)


@register("electra-base")
def electra_base() -> ModelConfig:
    """ELECTRA discriminator: 12 layers of 768, 110M parameters (Clark et al. 2020, table 3)."""
    return electra(12, 768, 12, 768)


@register("electra-large")
def electra_large() -> ModelConfig:
    """ELECTRA discriminator: 24 layers of 1024, 335M parameters (Clark et al. 2020, table 2)."""
    return electra(24, 1024, 16, 1024)


@register("electra-base-generator")
def electra_base_generator() -> ModelConfig:
    """ELECTRA generator: 12 layers of 256 above token vectors of 768 (Clark et al. 2020, table 6).

    A third of the width of `electra-base`, which it is trained with.
    """
    return electra(12, 256, 4, 768, MaskedConfig())
