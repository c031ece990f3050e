"""ELECTRA's discriminators and generators: BERT's layout, the small ones with narrow token vectors."""

import dataclasses

from polyformer.models.config import ModelConfig
from polyformer.models.presets.base import model_config, register_sizes, size_options
from polyformer.nn.heads import DetectConfig, HeadConfig, MaskedConfig

SIZES = {  # layers, width, heads, size of token vectors
    "electra-small": ((12, 256, 4, 128), "discriminator: 12 layers of 256, 14M parameters", "section 3.3"),
    "electra-base": ((12, 768, 12, 768), "discriminator: 12 layers of 768, 110M parameters", "table 3"),
    "electra-large": ((24, 1024, 16, 1024), "discriminator: 24 layers of 1024, 335M parameters", "table 2"),
    # the generator that `electra-base` is trained with, a third of its width
    "electra-base-generator": (
        (12, 256, 4, 768, MaskedConfig()),
        "generator: 12 layers of 256 above token vectors of 768",
        "table 6",
    ),
}


@register_sizes("ELECTRA {} (Clark et al. 2020, {}).", SIZES)
def electra(
    layers: int, width: int, heads: int, embedding: int, head: HeadConfig | None = None
) -> ModelConfig:
    """Return a discriminator or a model with `head`; `embedding` is the size of token vectors."""
    config = model_config("bert-base", {**size_options(layers, width, heads), "pad": 0})
    sum_size = None if embedding == width else embedding
    return dataclasses.replace(
        config, embedding=dataclasses.replace(config.embedding, size=sum_size), head=head or DetectConfig()
    )
