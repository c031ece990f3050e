"""DoLa: decoding with the log-probabilities of the last layer minus those from an earlier layer.

    F(v) = log p_N(v) - log p_M(v)   where p_N(v) >= 0.1 max p_N, -inf elsewhere
    M    = argmax over candidate layers j of JSD(p_N || p_j)

p_j is the distribution of the model's final norm and head on the state before layer j, so that p_0 uses the
embedding sum, and p_N the output of the last layer. Tokens are drawn from softmax(F): its log-probabilities
replace the model's, in greedy search or sampling, and M is chosen separately for each token of each text.
Chuang et al. 2024, section 2.

"low" means every second layer of the lower half, "high" of the upper half; for deep models (above 40 layers)
of the first or last 20 layers, as in the paper. If the head is tied to the token table, the states before the
first two layers still mostly encode the token itself, so "low" excludes them.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from polyformer.core.errors import InputError

# The least share of the highest probability that another token must have.
PLAUSIBLE = 0.1


def candidate_layers(
    layers: Literal["low", "high"] | tuple[int, ...], depth: int, tied: bool
) -> tuple[int, ...]:
    """Return the candidate layers of a model of `depth` layers.

    Raises `InputError` for layers that the model does not have.
    """
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
    """Return F as log-probabilities from the logits `last` [..., V] and those of the candidate layers."""
    final = last.log_softmax(-1)
    layers = torch.stack([logits.log_softmax(-1) for logits in earlier])  # [J, ..., V]
    if len(earlier) > 1:
        chosen = torch.stack([divergence(final, layer) for layer in layers]).argmax(0)
        index = chosen[None, ..., None].expand(1, *last.shape)
        # M differs between tokens.
        layers = layers.gather(0, index)
    # 0.1 max p, in log space.
    plausible = final >= final.amax(-1, keepdim=True) + torch.tensor(PLAUSIBLE, dtype=final.dtype).log()
    return (final - layers[0]).masked_fill(~plausible, -torch.inf).log_softmax(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence [...] of two distributions of log-probabilities [..., V]."""
    mean = torch.logaddexp(p, q) - torch.log(torch.tensor(2.0, dtype=p.dtype, device=p.device))
    return ((p.exp() * (p - mean)).nansum(-1) + (q.exp() * (q - mean)).nansum(-1)) / 2


# Hidden states [N, K, E] before the head to logits [N, K, V].
Predict = Callable[[Tensor], Tensor]


class Dola:
    """The contrast F, which replaces a model's logits.

    layers: the candidates. predict: the head. norm: the norm between the last layer and the head.
    """

    def __init__(self, layers: tuple[int, ...], predict: Predict, norm: Callable[[Tensor], Tensor]):
        self.layers, self.predict, self.norm = layers, predict, norm

    def __call__(self, logits: Tensor, hidden_states: Sequence[Tensor]) -> Tensor:
        """Return the contrasted logits of the last K tokens.

        logits: [N, K, V]. hidden_states: [N, T, E], before every layer and at the end.
        """
        count = logits.shape[1]
        earlier = [self.predict(self.norm(hidden_states[layer][:, -count:])) for layer in self.layers]
        return contrasted(logits, earlier)
