"""Old name of `polyformer.models.transformers`, for checkpoints that were uploaded with their code."""

from polyformer.models.transformers import *
