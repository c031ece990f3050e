"""The choice of experts for each token: scores of the experts, selection and gates.

    l = x W_r + b_r                     logits of the experts (b_r: `router_bias`)
    s = softmax(l), or sigmoid(l)
    chosen = the k experts with the largest s + b
    g = scale s_e / (sum of the chosen s), or scale s_e

For a softmax, the first form of g is the softmax over the chosen experts. b (`selection_bias`) changes which
experts are chosen, and no gate. It has no gradient: after each backward pass it grows by `bias_rate` for
experts with fewer tokens than the mean, and falls by as much for experts with more (Wang et al. 2024,
algorithm 1). Counts are all-reduced over all processes; accumulated batches change b one by one. With the
rate 0, b is constant.

With `groups`, a token chooses among the experts of `groups_used` groups: those with the largest sum of their
`group_top` best s + b. DeepSeek-V2 ranks groups by their best expert, DeepSeek-V3 by their best two.

DeepSeek-AI 2024 (DeepSeek-V2), section 2.2; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
"""

import dataclasses
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.key_exchange import total, total_of_parts
from polyformer.core.errors import InputError
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.sequence_shards import SequenceShard
from polyformer.nn.feedforward.base import FeedForwardConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertRoutingConfig(FeedForwardConfig):
    """Base of a feed-forward with experts: the options of their choice."""

    experts: PositiveInt = 8
    top_k: int = 2
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the experts, from the router's logits
    gates: Literal["chosen", "all"] = "chosen"  # the experts over which the scores are normalized
    gate_scale: PositiveFloat = 1.0
    router_bias: bool = False
    selection_bias: bool = False  # added to the scores for the choice, and not for the gates
    bias_rate: NonNegativeFloat = 0.0  # by which a backward pass changes `selection_bias`
    groups: PositiveInt = 1  # of consecutive experts
    groups_used: PositiveInt | None = None  # groups with the experts of a token; by default all
    group_top: PositiveInt = 1  # a group is ranked by the sum of this many best scores

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise InputError(f"top_k: expected from 1 to the {self.experts} experts, got {self.top_k}")
        if self.top_k == 1 and self.gates == "chosen" and self.experts > 1:
            raise InputError(
                f"gates: a {self.scores} over 1 chosen expert is always 1, so the router has no gradient; "
                "with top_k 1 use gates 'all'"
            )
        if self.bias_rate and not self.selection_bias:
            raise InputError(
                f"bias_rate: expected 0 without selection_bias, got {self.bias_rate}; set selection_bias"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise `InputError` for groups of unequal sizes, and for too few experts in the groups used."""
        if self.experts % self.groups:
            raise InputError(f"groups: expected a divisor of the {self.experts} experts, got {self.groups}")
        size, used = self.experts // self.groups, self.groups_used or self.groups
        if used > self.groups:
            raise InputError(f"groups_used: expected at most the {self.groups} groups, got {used}")
        if self.top_k > size * used:
            raise InputError(
                f"groups_used: {used} groups have {size * used} experts, fewer than top_k {self.top_k}; "
                "use more groups"
            )
        if self.group_top > size:
            raise InputError(
                f"group_top: expected at most the {size} experts of a group, got {self.group_top}"
            )


def choose_experts(
    logits: Tensor, config: ExpertRoutingConfig, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chosen experts [.., k], their gates [.., k] and all normalized scores [.., X].

    logits: [.., X]. bias: the selection bias [X].
    """
    softmax = config.scores == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    with torch.no_grad():
        # Logits have the order of scores, but no ties by rounding.
        ranks = logits if bias is None and config.groups == 1 else scores
        ranks = ranks if bias is None else ranks + bias.to(ranks.dtype)
        chosen = _within_groups(ranks, config).topk(config.top_k, -1).indices
    if softmax and config.gates == "chosen":  # the same as normalized scores, but exact for small scores
        gates = logits.gather(-1, chosen).softmax(-1)
    else:
        gates = scores.gather(-1, chosen)
        gates = gates / gates.sum(-1, keepdim=True) if config.gates == "chosen" else gates
    gates = gates if config.gate_scale == 1 else gates * config.gate_scale
    return chosen, gates, scores if softmax else scores / scores.sum(-1, keepdim=True)


def _within_groups(ranks: Tensor, config: ExpertRoutingConfig) -> Tensor:
    """Return ranks [.., X] with -inf for experts outside the best groups of the token."""
    used = config.groups_used or config.groups
    if used == config.groups:
        return ranks
    grouped = ranks.unflatten(-1, (config.groups, -1))
    best = grouped.topk(config.group_top, -1).values.sum(-1).topk(used, -1).indices
    unused = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(unused.unsqueeze(-1), -torch.inf).flatten(-2)


def balance_after_backward(bias: Tensor, rate: float, logits: Tensor, chosen: Tensor, valid: Tensor) -> None:
    """Move the selection bias [X] towards equal loads, once the gradient of the logits is computed.

    Recomputed activations then have the same choices. chosen: [B, T, k]. valid: real tokens [B, T].
    """
    loads = (expert_counts(chosen, len(bias)) * valid.unsqueeze(-1)).sum((0, 1))

    @torch.no_grad()
    def update(_: Tensor) -> None:
        # All processes must move the bias alike.
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(loads)
        bias.add_((loads.double().mean() - loads).sign().to(bias.dtype), alpha=rate)

    if logits.requires_grad:
        logits.register_hook(update)


def balance_loss(
    probabilities: Tensor, chosen: Tensor, valid: Tensor, over: SequenceShard | None = None
) -> Tensor:
    """Return X sum_e F_e P_e of probabilities [B, T, X], choices [B, T, k] and real tokens [B, T].

    The result is 1 if all experts are chosen equally often.
    over: the processes that have the other tokens of the rows; the result then includes all tokens.
    """
    experts, weight = probabilities.shape[-1], valid.unsqueeze(-1).to(probabilities.dtype)
    counts, sums = (expert_counts(chosen, experts) * weight).sum((0, 1)), (probabilities * weight).sum((0, 1))
    count = weight.sum()
    if over is not None:
        counts, count, sums = total(counts, over), total(count, over), total_of_parts(sums, over)
    count = count.clamp_min(1)
    # F_e = counts / (tokens k) has no gradient; the router learns through P_e.
    return experts * (counts / (count * chosen.shape[-1]) * sums / count).sum()


def within_capacity(chosen: Tensor, experts: int, valid: Tensor, doc: Tensor | None, share: float) -> Tensor:
    """Return whether the expert has capacity for the choice, [B, T, k].

    The capacity for t tokens of a document is ceil(share * t).
    """
    counts = expert_counts(chosen, experts) * valid.unsqueeze(-1)
    cumulated = torch.cat([counts, valid.long().unsqueeze(-1)], -1)
    # At token t: choices of every expert so far, and in the last column the tokens so far.
    totals = cumulated.cumsum(1)
    if doc is not None:  # subtract the counts before the start of the document
        starts = torch.ones_like(doc, dtype=torch.bool)
        starts[:, 1:] = doc[:, 1:] != doc[:, :-1]
        before = torch.where(starts.unsqueeze(-1), totals - cumulated, 0)
        totals = totals - before.cummax(1).values
    limit = (totals[..., -1:].double() * share).ceil()
    return totals[..., :-1].gather(-1, chosen) <= limit


def expert_counts(chosen: Tensor, experts: int) -> Tensor:
    """Return [B, T, X]: 1 for each expert that the token chose."""
    return F.one_hot(chosen, experts).sum(-2)


def valid_tokens(x: Tensor, context: Context | None) -> Tensor:
    """Return which of the tokens x [B, T, E] are not padding, [B, T]."""
    valid = None if context is None else context.q_valid
    if valid is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return valid.expand(x.shape[:2])
