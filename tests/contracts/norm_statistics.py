"""Running statistics of norms, for tests: those of a new model (0 and 1) norm nothing."""

from torch import Tensor

from polyformer.core.ops.norms import BatchNorm
from polyformer.models.architectures import Transformer


def fit_statistics(model: Transformer, batch: dict[str, Tensor]) -> None:
    """Running statistics, where there are any, become those of `batch`; the model is in training after it."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        model.train()(**batch)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
