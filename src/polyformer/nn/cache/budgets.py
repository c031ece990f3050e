"""Budgets that differ by layer or by head, around a policy that scores the keys.

Pyramid: budgets fall linearly from the first layer to the last, with the same total.

    b_l = least + (b - least) (1 + slope (1 - 2 l / (L - 1))),    l = 0 .. L - 1

b is the budget of the policy inside, and `least` the keys that it always keeps and one more. Layers with a
window do not count. With `ratio` the share falls in the same way. Cai et al. 2024 (PyramidKV), section 3;
their beta is 1 / (1 - slope).

Ada: the keys of all heads of a layer compete for the layer's budget.

    c_h = how many of the H b keys with the highest s_hj are of head h
    b_h = (1 - alpha) c_h + alpha b

Each key head keeps the b_h keys with the highest scores. The share alpha of a budget is a head's own; numbers
are rounded by the largest remainders, so that they add up to H b. Feng et al. 2024 (AdaKV), algorithm 1, with
the `floor_alpha` of the authors' code.

Costs of Ada: heads share one tensor of keys, as long as that of the head with the
most, max_h b_h instead of b: up to H (1 - alpha) + alpha times as much. A mask of single heads hides the
rest, so that scores are computed without a fused kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from torch import Tensor

from polyformer.attention.mechanisms.base import DelegatedTerms, ScoreTerms
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import Share, Wording
from polyformer.core.sequence.context import Context
from polyformer.nn.cache.base import (
    CachePolicy,
    CompressedCache,
    DroppingPolicy,
    check_tables,
    prompt_lengths,
)
from polyformer.nn.cache.call import CacheCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ada(CachePolicy):
    """Let the keys of all heads of a layer compete for the layer's budget.

    `of`: the policy that scores the keys of the prompt. `alpha`: the part of its budget that a head keeps.
    """

    of: CachePolicy
    alpha: Share = 0.2

    kind: ClassVar[str] = "ada"
    paper: ClassVar[str] = "Feng et al. 2024 (AdaKV), algorithm 1"
    drops_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.of, DroppingPolicy) or self.of.after_every_call:
            raise InputError(
                "of: expected a policy that drops keys after the prompt, such as 'snapkv(budget=1024)' or "
                f"'expected(ratio=0.5)', got {quote(self.of.kind)}"
            )

    @classmethod
    def examples(cls) -> tuple["Ada", ...]:
        inside = CachePolicy.from_dict("snapkv(budget=8, window=3, kernel=3)")
        return cls(of=inside), cls(of=inside, alpha=0.5)

    @property
    def basis(self) -> DroppingPolicy:
        """The policy that scores the keys."""
        assert isinstance(self.of, DroppingPolicy)
        return self.of

    def changed_by(self, share: float) -> "Ada":
        """Return the policy with a budget that is larger by this share."""
        return dataclasses.replace(self, of=self.basis.changed_by(share))

    def new_state(self, reserve: int) -> "HeadsCache":
        return HeadsCache(self.basis, self.basis.new_cache(reserve), alpha=self.alpha)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pyramid(CachePolicy):
    """Let the budgets of a policy fall linearly from the first layer to the last, with the same total.

    `of`: the policy; its budget is the mean. `slope`: the part of it by which the first layer has more, and
    the last layer fewer.
    """

    of: CachePolicy
    slope: Annotated[float, Interval(ge=0, lt=1), Wording("a slope")] = 0.9

    kind: ClassVar[str] = "pyramid"
    paper: ClassVar[str] = "Cai et al. 2024 (PyramidKV), section 3"
    drops_keys: ClassVar[bool] = True

    def __post_init__(self) -> None:
        basis = self.of.basis
        if not isinstance(basis, DroppingPolicy) or not isinstance(self.of, DroppingPolicy | Ada):
            raise InputError(
                "of: expected a policy that drops keys, such as 'snapkv(budget=1024)', or 'ada' of it, got "
                f"{quote(self.of.kind)}"
            )
        if basis.ratio is not None and basis.ratio * (1 + self.slope) > 1:
            raise InputError(
                f"slope: expected at most {1 / basis.ratio - 1:.3g} with ratio={basis.ratio}, as the first "
                f"layer keeps ratio * (1 + slope) of the keys, got {self.slope}; lower one of both"
            )

    @classmethod
    def examples(cls) -> tuple["Pyramid", ...]:
        inside = CachePolicy.from_dict("snapkv(budget=8, window=3, kernel=3)")
        return cls(of=inside, slope=0.5), cls(of=Ada(of=inside))

    @property
    def basis(self) -> CachePolicy:
        """The policy that scores the keys."""
        return self.of.basis

    def for_layers(self, count: int) -> Sequence[CachePolicy]:
        """Return the policies of `count` layers, with budgets that fall from the first to the last."""
        places = [1 - 2 * layer / max(1, count - 1) for layer in range(count)] if count > 1 else [0.0]
        return [self.of.changed_by(self.slope * place) for place in places]


@dataclasses.dataclass(frozen=True, eq=False)
class PresentTerms(DelegatedTerms):
    """The terms `position`, by which a head sees only its own of the first `size` keys: the last of them.

    counts: [B, Hkv], how many.
    """

    counts: Tensor
    size: int

    @property
    def is_plain(self) -> bool:
        """Return False: keys are hidden."""
        return False

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod:
        """Return a function that hides the other keys from the queries q [B, H, Tq, D]."""
        before, groups = self.position.score_mod(q, k, context), q.shape[1] // k.shape[1]
        first = self.size - self.counts

        @broadcasts
        def hide(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            score = score if before is None else before(score, b, h, q_idx, kv_idx)
            return torch.where(kv_idx >= first[b, h // groups], score, -torch.inf)

        return hide


@dataclasses.dataclass(frozen=True)
class HeadsCache(CompressedCache):
    """The cache of a layer with different numbers of keys per head.

    alpha: of `Ada`. counts: [B, Hkv], the keys of the prompt that each head keeps, the last of its first K
    keys; the others are copies of its first key, and hidden. None before any is dropped.
    """

    alpha: float = 0.0
    counts: Tensor | None = None

    def __str__(self) -> str:
        """Return how many tokens of the first text the heads keep."""
        if self.counts is None or self.kept is None:
            return f"ada: all {self.cache.held:,} tokens"
        new = self.cache.held - self.kept.shape[-1]
        least, most = (int(x) + new for x in self.counts[0].aminmax())
        return f"ada: heads keep {least:,} to {most:,} of {self.seen + new:,} tokens"

    def after(self, call: CacheCall) -> "HeadsCache":
        """Return the state after a call; keys are dropped after the first."""
        policy, cache = self.policy, call.cache
        if self.seen:
            return dataclasses.replace(self, cache=cache)
        lengths = prompt_lengths(call)
        budgets = [min(policy.budget_for(length), length) for length in lengths]
        if budgets == lengths:
            return dataclasses.replace(self, cache=cache, seen=cache.held)
        check_tables(policy, call.context)
        valid = call.context.kv_valid
        valid = None if valid is None else valid.bool()
        scores = policy.with_always(policy.scores(call, None), valid, policy.always(max(budgets)))
        counts = shared_out(scores, torch.tensor(budgets), self.alpha).to(scores.device)
        index = first_of_each(scores, counts)
        return dataclasses.replace(
            self, cache=cache.gathered(index), kept=index, seen=cache.held, counts=counts
        )

    def _terms(self, terms: ScoreTerms) -> ScoreTerms:
        if self.counts is None or self.kept is None:
            return terms
        return PresentTerms(terms, self.counts, self.kept.shape[-1])


def shared_out(scores: Tensor, budgets: Tensor, alpha: float) -> Tensor:
    """Return the number of keys of each head, [B, Hkv], by the scores [B, Hkv, T] of a layer's keys.

    budgets: [B], the mean of a row's heads. alpha: its share that each head keeps.
    """
    total, heads = scores.shape[1] * budgets.unsqueeze(1), scores.flatten(1)
    rank = heads.argsort(dim=-1, descending=True, stable=True).argsort(-1).view_as(scores)
    won = (rank < total.to(rank.device).unsqueeze(1)).sum(-1).cpu()
    exact = (1 - alpha) * won.double() + alpha * budgets.unsqueeze(1)
    whole = (exact + 1e-9).floor()
    # The largest remainders are rounded up, of equal ones the earlier head's.
    remainder = ((exact - whole) * 2**20).round()
    place = remainder.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return whole.long() + (place < total - whole.sum(-1, keepdim=True))


def first_of_each(scores: Tensor, counts: Tensor) -> Tensor:
    """Return the keys of the `counts` [B, Hkv] highest scores [B, Hkv, T] of each head, in order.

    [B, Hkv, K], with K the largest count; a head with fewer has copies of its first key before it.
    """
    size = int(counts.max())
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :size]
    place = torch.arange(size, device=scores.device)
    present = place < counts.unsqueeze(-1)
    index = best.gather(-1, (best + scores.shape[-1] * present).argsort(-1))
    missing = (size - counts).unsqueeze(-1)
    return torch.where(place < missing, index.gather(-1, missing.clamp_max(size - 1)), index)
