"""Public checkpoints: families of models in the layout of the hub, read and written."""

import polyformer.models.checkpoints.families
from polyformer.models.checkpoints.convert import (
    convert,
    extend_positions,
    fit_tables,
    keep_positions,
    read_attention,
)
from polyformer.models.checkpoints.family import FAMILIES, Family
from polyformer.models.checkpoints.load import config_of, from_pretrained, from_transformers, start_from
from polyformer.models.checkpoints.save import save
from polyformer.models.checkpoints.transfer import Report, transfer

__all__ = [
    "FAMILIES",
    "Family",
    "Report",
    "config_of",
    "convert",
    "extend_positions",
    "fit_tables",
    "from_pretrained",
    "from_transformers",
    "keep_positions",
    "read_attention",
    "save",
    "start_from",
    "transfer",
]
