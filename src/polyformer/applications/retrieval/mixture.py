"""The mixture of the model's distribution and the neighbours' distribution: `definition`, optimized."""

import dataclasses
import math

import torch
from torch import Tensor

from polyformer.applications.retrieval.store import MixtureConfig, Neighbours, Store
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """log p = log(lambda p_kNN + (1 - lambda) p_LM), for `generate(mixture=)`."""

    store: Store
    config: MixtureConfig = MixtureConfig()

    def __call__(self, logits: Tensor, keys: Tensor) -> Tensor:
        """Return log p [N, K, V] from the model's logits [N, K, V] and the keys [N, K, D]."""
        near = self.store.search(keys.flatten(0, -2), self.config.neighbours)
        log_p = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        mixed = self.mixed(log_p.flatten(0, -2), near)
        return mixed.view_as(log_p)

    def mixed(self, log_p: Tensor, near: Neighbours) -> Tensor:
        """Return log p [N, V] from the model's log p [N, V] and the neighbours of each row.

        Rows without neighbours keep the model's log p. Raises `InputError` for a neighbour with a token
        outside the model's vocabulary.
        """
        least, most = near.values.aminmax()
        if least < 0 or most >= log_p.shape[-1]:
            raise InputError(
                f"the datastore has a token {int(most if least >= 0 else least)}, beyond the model's "
                f"vocabulary of {log_p.shape[-1]}; it is damaged: see polyformer datastore verify"
            )
        weights = neighbour_weights(near.distances, self.config.temperature).to(log_p.dtype)
        share = log_p.new_zeros(log_p.shape).scatter_add(1, near.values, weights)
        own, theirs = log(1 - self.config.weight), log(self.config.weight)
        mixed = torch.logaddexp(log_p + own, share.log() + theirs)
        return torch.where(near.distances[:, :1].isfinite(), mixed, log_p)


def neighbour_weights(distances: Tensor, temperature: float) -> Tensor:
    """Return softmax(-d / T) [N, k] of distances [N, k], nearest first; zeros for rows without neighbours."""
    apart = distances - distances[:, :1]  # NaN if the nearest is infinite
    return (-apart / temperature).softmax(-1).nan_to_num(0.0)


def log(x: float) -> float:
    """Return the logarithm, minus infinity for 0."""
    return math.log(x) if x > 0 else -math.inf
