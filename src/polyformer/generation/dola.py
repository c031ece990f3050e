"""DoLa, decoding by contrasting layers: what the last layers added to what the earlier ones would say.

    F(v) = log p_N(v) - log p_M(v)   where p_N(v) >= 0.1 max p_N, -inf elsewhere
    M    = argmax over candidate layers j of JSD(p_N || p_j)

p_j is what the model's final norm and head make of the state before layer j, so that p_0 is of the embedding
sum, and p_N of the end. Written is softmax(F): its log-probabilities take the place of the model's, greedily
or in sampling, and each token of each text has a layer M of its own. Chuang et al. 2024, section 2.

"low" are every second layer of the lower half, "high" of the upper one, of deep models (above 40 layers) of
the first or last 20 layers, as in the paper. Where the head reads the token table, the states before the
first two layers are still the token itself, and are none of "low".
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from polyformer.core.errors import InputError

PLAUSIBLE = 0.1
"""The share of the likeliest token's probability that another must have."""


def candidate_layers(
    layers: Literal["low", "high"] | tuple[int, ...], depth: int, tied: bool
) -> tuple[int, ...]:
    """The candidates of a model of `depth` layers; raises `InputError` for those that it has not."""
    first = 2 if tied and depth > 2 else 0
    if layers == "low":
        end = depth // 2 if depth <= 40 else 20
        return tuple(range(first, end, 2)) or (first,)
    if layers == "high":
        return tuple(range(depth // 2 if depth <= 40 else depth - 20, depth, 2))
    assert not isinstance(layers, str)
    for layer in layers:
        if layer >= depth:
            raise InputError(
                f"dola_layers: expected layers from 0 to {depth - 1}, before the last, got {layer}"
            )
    return tuple(sorted(set(layers)))


def contrasted(last: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """F of the logits `last` [..., V] of the model and those of the candidate layers, log-probabilities."""
    final = last.log_softmax(-1)
    layers = torch.stack([logits.log_softmax(-1) for logits in earlier])  # [J, ..., V]
    if len(earlier) > 1:
        chosen = torch.stack([divergence(final, layer) for layer in layers]).argmax(0)
        index = chosen[None, ..., None].expand(1, *last.shape)
        layers = layers.gather(0, index)
    plausible = final >= final.amax(-1, keepdim=True) + torch.tensor(PLAUSIBLE, dtype=final.dtype).log()
    return (final - layers[0]).masked_fill(~plausible, -torch.inf).log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence [...] of two distributions, given as logarithms [..., V]."""
    mean = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0, dtype=p.dtype, device=p.device))
    return ((p.exp() * (p - mean)).nansum(-1) + (q.exp() * (q - mean)).nansum(-1)) / 2


Predict = Callable[[Tensor], Tensor]
"""Hidden states [N, K, E], as the head reads them, to logits [N, K, V]."""


class Dola:
    """F in place of a model's logits.

    layers: the candidates. predict: the head. norm: what the last layer's output goes through before it.
    """

    def __init__(self, layers: tuple[int, ...], predict: Predict, norm: Callable[[Tensor], Tensor]):
        self.layers, self.predict, self.norm = layers, predict, norm

    def __call__(self, logits: Tensor, hidden_states: Sequence[Tensor]) -> Tensor:
        """logits: [N, K, V], of the last K tokens. hidden_states: [N, T, E], before every layer and at the
        end."""
        count = logits.shape[1]
        earlier = [self.predict(self.norm(hidden_states[layer][:, -count:])) for layer in self.layers]
        return contrasted(logits, earlier)
