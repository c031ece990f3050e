"""Mixture of experts: a router sends each token to `top_k` of X feed-forwards.

    l = x W_r        y = sum over the chosen e of g_e f_e(x)
    g = softmax of l over the chosen experts (Shazeer, GShard), or over all of them (Switch)

Training adds balance * X * sum_e F_e P_e to the loss: F_e is the fraction of choices of expert e, and P_e the
mean of its softmax over all experts (Fedus et al. 2022, equations 4 to 6, for a single choice per token).
Padding is not sent to experts and not counted. The cost is top_k expert passes per token, batched per expert.

`capacity` limits the number of tokens per expert in training. An expert accepts at most
ceil(capacity * top_k * t / X) of the first t tokens of a document. Further tokens that choose this expert
pass it on the residual stream. Deviation: the papers count over the batch and the whole length, so that
dropping a token depends on other rows and later tokens; here it depends only on earlier tokens of the same
document. Evaluation drops no tokens. The router is computed in float32. If a sequence is spread over
processes, all of its tokens count: the processes sum F_e and P_e, and with a capacity they exchange their
choices.

Shazeer et al. 2017, section 2; Lepikhin et al. 2021, section 2.2; Fedus et al. 2022 (Switch), section 2.
"""

import dataclasses
import math
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Interval
from torch import Tensor, nn

from polyformer.attention.functional.context_parallel.exchange import everywhere, total, total_of_parts
from polyformer.core.auxiliary_losses import add_auxiliary_loss
from polyformer.core.errors import InputError, quote
from polyformer.core.ops.linear import ExactLinear, linear
from polyformer.core.ops.precision import without_autocast
from polyformer.core.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, Wording
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.sequence_shards import SequenceShard
from polyformer.core.token_records import record_mark
from polyformer.nn.feedforward.base import FeedForward, FeedForwardConfig

Capacity = Annotated[PositiveFloat, Wording(fix="null for no limit")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(FeedForwardConfig):
    """Mixture of experts: a router sends each token to a few of many feed-forwards.

    There are `experts` feed-forwards of the form `expert`; `top_k` of them process each token.
    """

    expert: FeedForwardConfig = dataclasses.field(
        default_factory=partial(FeedForwardConfig.from_dict, "dense")
    )
    experts: PositiveInt = 8
    top_k: int = 2
    gates: Literal["chosen", "all"] = "chosen"  # the experts over which the gates are a softmax
    capacity: Capacity | None = None  # of an expert, as a multiple of an equal share; null for no limit
    balance: NonNegativeFloat = 0.01  # the weight of the balance loss
    jitter: Annotated[float, Interval(ge=0, lt=1)] = 0.0  # in training the router reads x times 1 +- jitter

    kind: ClassVar[str] = "experts"
    paper: ClassVar[str] = "Shazeer et al. 2017; Fedus et al. 2022 (Switch), section 2"
    tokenwise: ClassVar[bool] = False
    exchanges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.expert.tokenwise:
            raise InputError(
                f"expert: {quote(self.expert.kind)} reads more than one token, but an expert receives only "
                "the tokens that are routed to it; use 'dense' or 'gated'"
            )
        if not 1 <= self.top_k <= self.experts:
            raise InputError(f"top_k: expected from 1 to the {self.experts} experts, got {self.top_k}")
        if self.top_k == 1 and self.gates == "chosen" and self.experts > 1:
            raise InputError(
                "gates: a softmax over 1 chosen expert is always 1, so the router has no gradient; "
                "with top_k 1 use gates 'all'"
            )

    def build(self, hidden_size: int) -> "Experts":
        """Return a router with `experts` copies of the expert."""
        return Experts(hidden_size, self)

    def for_layer(self, layer: int) -> "ExpertsConfig":
        """Return the configuration with the expert of layer `layer`."""
        return dataclasses.replace(self, expert=self.expert.for_layer(layer))

    @classmethod
    def examples(cls) -> tuple["ExpertsConfig", ...]:
        """Return examples with all experts chosen, with all other options set, and with most experts idle."""
        gated = FeedForwardConfig.from_dict("gated")
        return (
            cls(experts=2),
            cls(expert=gated, experts=2, gates="all", capacity=1.0, jitter=0.01),
            cls(experts=24),
        )


class Experts(FeedForward):
    """A router and its experts, which map x [..., T, E] to [..., T, E]."""

    def __init__(self, hidden_size: int, config: ExpertsConfig):
        super().__init__()
        self.config = config
        self.router = ExactLinear(hidden_size, config.experts, bias=False)
        self.experts = nn.ModuleList(config.expert.build(hidden_size) for _ in range(config.experts))

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return y = sum over the chosen e of g_e f_e(x)."""
        rows = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        chosen, gates, accepted = self.route(rows, context)
        self._record_routing(chosen, gates, accepted)
        # `_mix_grouped` reads the number of tokens per expert, which would break a compiled graph.
        mix = self._mix_dense if torch.compiler.is_compiling() else self._mix_grouped
        return mix(rows, chosen, gates, accepted).view(x.shape)

    def forward_dense(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Return the same result for x [B, T, E] directly from the equation: each expert reads all tokens."""
        return self._mix_dense(x, *self.route(x, context))

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
            # l = x W_r, [B, T, X]. Half precision could change which experts are chosen.
            logits = linear(router_input, self.router.weight.to(exact))
        top, chosen = logits.topk(self.config.top_k, -1)
        probabilities = logits.softmax(-1)
        # Shazeer normalizes over the k chosen experts, Switch over all X.
        gates = top.softmax(-1) if self.config.gates == "chosen" else probabilities.gather(-1, chosen)
        valid = _valid_tokens(x, context)
        if self.config.balance:
            over = None if context is None else context.shard
            loss = balance_loss(probabilities, chosen, valid, over)
            add_auxiliary_loss("balance", self.config.balance * loss)
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
        accepted = within_capacity(chosen, self.config.experts, _valid_tokens(chosen, context), doc, part)
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


def balance_loss(
    probabilities: Tensor, chosen: Tensor, valid: Tensor, over: SequenceShard | None = None
) -> Tensor:
    """Return X sum_e F_e P_e of probabilities [B, T, X], choices [B, T, k] and real tokens [B, T].

    The result is 1 if all experts are chosen equally often.
    over: the processes that have the other tokens of the rows; the result then includes all tokens.
    """
    experts, weight = probabilities.shape[-1], valid.unsqueeze(-1).to(probabilities.dtype)
    counts, sums = (_counts(chosen, experts) * weight).sum((0, 1)), (probabilities * weight).sum((0, 1))
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
    counts = _counts(chosen, experts) * valid.unsqueeze(-1)
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


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """Return [B, T, X]: 1 for each expert that the token chose."""
    return F.one_hot(chosen, experts).sum(-2)


def _valid_tokens(x: Tensor, context: Context | None) -> Tensor:
    """Return which of the tokens x [B, T, E] are not padding, [B, T]."""
    valid = None if context is None else context.q_valid
    if valid is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return valid.expand(x.shape[:2])
