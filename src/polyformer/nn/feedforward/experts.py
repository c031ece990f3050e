"""Mixture of experts: a router sends each token to `top_k` of X feed-forwards.

    y = sum over the chosen e of g_e f_e(x)
    l = x W_r + b_r                     logits of the experts (b_r: `router_bias`)
    s = softmax(l), or sigmoid(l)
    chosen = the k experts with the largest s + b
    g = scale s_e / (sum of the chosen s), or scale s_e

For a softmax, the first form of g is the softmax over the chosen experts (Shazeer, GShard), and the second
the softmax over all of them (Switch). A `shared_expert` processes every token: y grows by f_s(x), or by
sigmoid(x w) f_s(x) with a `shared_expert_gate` (DeepSeek-V2, Qwen).

Training adds balance * X * sum_e F_e P_e to the loss: F_e is the fraction of choices of expert e, and P_e the
mean of its softmax over all experts (Fedus et al. 2022, equations 4 to 6, for a single choice per token);
with sigmoid scores, the mean of its share of their sum (DeepSeek-V3, equations 17 to 20).
Padding is not sent to experts and not counted. The cost is top_k expert passes per token, batched per expert.

`capacity` limits the number of tokens per expert in training. An expert accepts at most
ceil(capacity * top_k * t / X) of the first t tokens of a document. Further tokens that choose this expert
pass it on the residual stream. Deviation: the papers count over the batch and the whole length, so that
dropping a token depends on other rows and later tokens; here it depends only on earlier tokens of the same
document. Evaluation drops no tokens. The router is computed in float32. If a sequence is spread over
processes, all of its tokens count: the processes sum F_e and P_e, and with a capacity they exchange their
choices.

b (`selection_bias`) changes which experts are chosen, and no gate. It has no gradient: after each backward
pass it grows by `bias_rate` for experts with fewer tokens than the mean, and falls by as much for experts
with more (Wang et al. 2024, algorithm 1). Counts are all-reduced over all processes; accumulated batches
change b one by one. With the rate 0, b is constant.

With `groups`, a token chooses among the experts of `groups_used` groups: those with the largest sum of their
`group_top` best s + b. DeepSeek-V2 ranks groups by their best expert, DeepSeek-V3 by their best two.

Shazeer et al. 2017, section 2; Lepikhin et al. 2021, section 2.2; Fedus et al. 2022 (Switch), section 2.
DeepSeek-AI 2024 (DeepSeek-V2), section 2.2; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
"""

import dataclasses
import math
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.attention.functional.key_exchange import everywhere, total, total_of_parts
from polyformer.core.errors import InputError, quote
from polyformer.core.instrumentation import record_mark
from polyformer.core.ops.autograd import without_autocast
from polyformer.core.ops.layers import add_auxiliary_loss
from polyformer.core.ops.linear import ExactLinear, linear
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Wording
from polyformer.core.sequence.context import Context, SequenceShard
from polyformer.nn.feedforward.feedforward import FeedForward, FeedForwardConfig


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


Capacity = Annotated[PositiveFloat, Wording(fix="null for no limit")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ExpertRoutingConfig):
    """Mixture of experts: a router sends each token to a few of many feed-forwards.

    There are `experts` feed-forwards of the form `expert`; `top_k` of them process each token.
    """

    expert: FeedForwardConfig = dataclasses.field(
        default_factory=partial(FeedForwardConfig.from_dict, "dense")
    )
    shared_expert: FeedForwardConfig | None = None  # an expert of all tokens, without routing
    shared_expert_gate: bool = False  # whether sigmoid(x w) scales the output of the shared expert
    capacity: Capacity | None = None  # of an expert, as a multiple of an equal share; null for no limit
    balance: NonNegativeFloat = 0.01  # the weight of the balance loss
    jitter: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # in training the router reads x times 1 +- jitter

    kind: ClassVar[str] = "experts"
    paper: ClassVar[str] = "Shazeer et al. 2017; Fedus et al. 2022 (Switch), section 2"
    tokenwise: ClassVar[bool] = False
    exchanges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, part in (("expert", self.expert), ("shared_expert", self.shared_expert)):
            if part is not None and not part.tokenwise:
                raise InputError(
                    f"{name}: {quote(part.kind)} reads more than one token, but an expert receives only "
                    "the tokens that are routed to it; use 'dense' or 'gated'"
                )
        if self.shared_expert_gate and self.shared_expert is None:
            raise InputError("shared_expert_gate: expected False without shared_expert, got True; set both")
        super().__post_init__()

    def build(self, hidden_size: int) -> "Experts":
        return Experts(hidden_size, self)

    def for_layer(self, layer: int) -> "ExpertsConfig":
        """Return the configuration with the experts of layer `layer`."""
        shared = None if self.shared_expert is None else self.shared_expert.for_layer(layer)
        return dataclasses.replace(self, expert=self.expert.for_layer(layer), shared_expert=shared)

    @classmethod
    def examples(cls) -> tuple["ExpertsConfig", ...]:
        """Return examples with all experts chosen, with the other options set, and with most experts idle."""
        gated = FeedForwardConfig.from_dict("gated")
        choice = {"scores": "sigmoid", "gate_scale": 2.0, "router_bias": True}
        groups = {"groups": 2, "groups_used": 1, "group_top": 2}
        balance = {"selection_bias": True, "bias_rate": 0.001}
        shared = {"shared_expert": gated, "shared_expert_gate": True}
        return (
            cls(experts=2),
            cls(expert=gated, experts=2, gates="all", capacity=1.0, jitter=0.01),
            cls(experts=24),
            cls(expert=gated, experts=4, **choice, **groups, **balance, **shared),
        )


class Experts(FeedForward):
    """A router and its experts, which map x [..., T, E] to [..., T, E]."""

    selection_bias: Tensor | None

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        super().__init__()
        self.config = config
        self.router = ExactLinear(hidden_size, config.experts, bias=config.router_bias)
        self.experts = nn.ModuleList(config.expert.build(hidden_size) for _ in range(config.experts))
        self.shared_expert = None if config.shared_expert is None else config.shared_expert.build(hidden_size)
        gated = config.shared_expert_gate
        self.shared_expert_gate = ExactLinear(hidden_size, 1, bias=False) if gated else None
        self.register_buffer("selection_bias", torch.zeros(config.experts) if config.selection_bias else None)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return y = sum over the chosen e of g_e f_e(x), plus the shared expert."""
        rows = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        chosen, gates, accepted = self.route(rows, context)
        self._record_routing(chosen, gates, accepted)
        # `_mix_grouped` reads the number of tokens per expert, which would break a compiled graph.
        mix = self._mix_dense if torch.compiler.is_compiling() else self._mix_grouped
        return self._with_shared(mix(rows, chosen, gates, accepted).view(x.shape), x)

    def forward_dense(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return the same result for x [B, T, E] directly from the equation: each expert reads all tokens."""
        return self._with_shared(self._mix_dense(x, *self.route(x, context)), x)

    def _with_shared(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y plus the output of the shared expert, if there is one."""
        if self.shared_expert is None:
            return y
        shared = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid() * shared
        return y + shared

    def route(self, x: Tensor, context: Context | None) -> tuple[Tensor, Tensor, Tensor]:
        """Route x [B, T, E]: return the chosen experts, their gates and whether they accept the token.

        Each result is [B, T, k].
        """
        exact = torch.promote_types(x.dtype, torch.float32)
        router_input = x.to(exact)
        if self.training and self.config.jitter:
            low, high = 1 - self.config.jitter, 1 + self.config.jitter
            router_input = router_input * torch.empty_like(router_input).uniform_(low, high)
        with without_autocast(x):
            # l = x W_r + b_r, [B, T, X]. Half precision could change which experts are chosen.
            bias = None if self.router.bias is None else self.router.bias.to(exact)
            logits = linear(router_input, self.router.weight.to(exact), bias)
        chosen, gates, probabilities = choose_experts(logits, self.config, self.selection_bias)
        valid = valid_tokens(x, context)
        if self.config.balance:
            over = None if context is None else context.shard
            loss = balance_loss(probabilities, chosen, valid, over)
            add_auxiliary_loss("balance", self.config.balance * loss)
        if self.training and self.config.bias_rate and self.selection_bias is not None:
            balance_after_backward(self.selection_bias, self.config.bias_rate, logits, chosen, valid)
        accepted = valid.unsqueeze(-1).expand_as(chosen)
        if self.training and self.config.capacity is not None:
            part = self.config.capacity * self.config.top_k / self.config.experts
            accepted = accepted & self._within_capacity(chosen, context, part)
        return chosen, gates, accepted

    def _within_capacity(self, chosen: Tensor, context: Context | None, part: float) -> Tensor:
        """Return `within_capacity` of the choices, counted over the tokens of all processes."""
        over = None if context is None else context.shard
        if context is not None and over is not None:
            chosen, context = everywhere(chosen, over, "choices of experts"), context.whole
        doc = None if context is None else context.q_doc
        accepted = within_capacity(chosen, self.config.experts, valid_tokens(chosen, context), doc, part)
        return accepted if over is None else over.take(accepted, 1)

    def _record_routing(self, chosen: Tensor, gates: Tensor, accepted: Tensor) -> None:
        """Mark the experts of each token and their gates, in the order of the choices."""
        for number in range(self.config.top_k):
            place = f", choice {number + 1}" if self.config.top_k > 1 else ""
            record_mark(f"expert{place}", lambda i=number: chosen.masked_fill(~accepted, -1)[:, None, :, i])
            record_mark(f"gate{place}", lambda i=number: (gates * accepted)[:, None, :, i])

    def _mix_grouped(self, x: Tensor, chosen: Tensor, gates: Tensor, accepted: Tensor) -> Tensor:
        """Sort the choices by expert, so that each expert reads all of its tokens at once.

        Experts without tokens run too, so that every expert always has a gradient.
        """
        count, k = self.config.experts, self.config.top_k
        expert = chosen.masked_fill(~accepted, count).flatten()
        # Choices that no expert accepts have the number `count`: they are last in the order and cut off.
        order = expert.argsort(stable=True)
        sizes = _sizes(expert, count)
        order = order[: sum(sizes)]
        # Choice j belongs to token j // k: order // k are the rows of x in the order of experts.
        sent = x.flatten(0, 1)[order // k].split(sizes)
        y = torch.cat([expert(tokens) for expert, tokens in zip(self.experts, sent)])
        y = (y * gates.flatten()[order].unsqueeze(-1)).to(y.dtype)
        scattered = y.new_zeros(len(expert), y.shape[-1]).index_copy(0, order, y)
        # The k results of a token are added.
        return scattered.unflatten(0, (-1, k)).sum(1).view(x.shape)

    def _mix_dense(self, x: Tensor, chosen: Tensor, gates: Tensor, accepted: Tensor) -> Tensor:
        empty = gates.new_zeros(*x.shape[:2], self.config.experts)
        # [B, T, X]: g_e for chosen experts, 0 for the others.
        weights = empty.scatter(-1, chosen, gates * accepted)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)  # [B, T, E, X]
        return (outputs * weights.unsqueeze(2)).sum(-1).to(outputs.dtype)


def _sizes(expert: Tensor, count: int) -> list[int]:
    """Return the number of choices that each of `count` experts takes, of all choices [N].

    On the meta device, which only traces shapes, all choices are distributed evenly over the experts.
    """
    if expert.is_meta:
        return [len(expert) // count + (number < len(expert) % count) for number in range(count)]
    return torch.bincount(expert, minlength=count + 1)[:count].tolist()
