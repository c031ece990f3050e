"""kNN-LM as defined in the paper, over keys that fit into memory. Khandelwal et al. 2020, equations 2 and 3.

    p_kNN(y | x) ~ the sum of exp(-d(k_i, f(x)) / T) over the neighbours (k_i, v_i) with v_i = y
    p(y | x) = lambda p_kNN(y | x) + (1 - lambda) p_LM(y | x)

d is the squared Euclidean distance, as in the paper's code. f(x) is the input of the last feed-forward, after
its norm. The neighbours are the k nearest entries.
"""

import torch
from torch import Tensor


def neighbour_probabilities(
    queries: Tensor, keys: Tensor, values: Tensor, neighbours: int, temperature: float, vocabulary: int
) -> Tensor:
    """Return p_kNN [N, V] of queries [N, D] among the keys [M, D] with their next tokens, values [M]."""
    distances = (queries.unsqueeze(1) - keys.unsqueeze(0)).square().sum(-1)
    nearest = distances.topk(min(neighbours, len(keys)), largest=False)
    weights = (-nearest.values / temperature).softmax(-1)
    tokens = torch.nn.functional.one_hot(values[nearest.indices].long(), vocabulary)
    return (weights.unsqueeze(-1) * tokens).sum(1)


def mixed(model: Tensor, neighbours: Tensor, weight: float) -> Tensor:
    """Return p [N, V], mixed from the model's p_LM and p_kNN, both [N, V]; `weight` is the paper's lambda."""
    return weight * neighbours + (1 - weight) * model
