"""Old name of `polyformer.models.transformers`: checkpoints that were uploaded with their code import it."""

from polyformer.models.transformers import *
