"""Plain definitions of the cache policies: dense attention in which each head masks its dropped keys."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

import polyformer
from polyformer.attention.mechanisms.base import Mechanism, PositionTerms
from polyformer.attention.positions import BoundPosition
from polyformer.attention.positions.by_distance import Alibi, T5Bias, buckets
from polyformer.core.kv_cache import KeyValueCache, appended
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Reach
from polyformer.core.state import State
from polyformer.models.architectures import Transformer
from polyformer.nn import H2O, DroppingPolicy, ExpectedAttention, SnapKV


def decoder(position: str = "rope", attention: str = "softmax", **options: object) -> Transformer:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 50, "num_hidden_layers": 2, "max_position_embeddings": 200, **heads}
    model = polyformer.create_model(
        "decoder-tiny",
        attention=attention,
        position=position,
        **{"initializer_range": 0.2, **sizes, **options},
    )
    assert isinstance(model, Transformer)
    return model.double().eval()


def rounded(x: Tensor) -> Tensor:
    """Return vectors x [..., D] rounded to 127 steps of each sign up to their largest number."""
    step = x.abs().max(-1, keepdim=True).values / 127
    return torch.where(step > 0, torch.round(x / step) * step, 0)


class Rounded(Mechanism):
    """A mechanism over rounded keys and values."""

    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.mechanism = mechanism

    def new_state(self, reserve: int) -> State | None:
        return self.mechanism.new_state(reserve)

    def reach(self) -> Reach | None:
        return self.mechanism.reach()

    def extended(self, state: State, k: Tensor, v: Tensor) -> State:
        return self.mechanism.extended(state, rounded(k), rounded(v))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        return self.mechanism(q, rounded(k), rounded(v), context, state, position)


def bias(position: PositionTerms, distance: Tensor) -> Tensor | float:
    """Return the bias [H, Tq, Tk] that ALiBi or T5 adds to scores; 0 for other schemes."""
    assert isinstance(position, BoundPosition)
    if isinstance(position.position, Alibi):
        return -torch.tensor(position.position.slopes)[:, None, None] * distance
    if isinstance(position.position, T5Bias):
        return position.position.table.weight[buckets(distance, 32, 128, both_sides=False)].movedim(-1, 0)
    return 0.0


class Dense(Mechanism):
    """Dense attention of a layer; `dropped` [B, Hkv, T] are masked, and chosen by the policy after calls."""

    def __init__(self, policy: DroppingPolicy):
        super().__init__()
        self.policy = policy
        self.dropped: Tensor | None = None
        self.tensors: Any = None
        self.weights = torch.zeros(0)
        self.lengths: list[int] = []  # of the rows' prompts

    def new_state(self, reserve: int) -> KeyValueCache:
        return KeyValueCache()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        if self.policy.int8:
            k, v = rounded(k), rounded(v)
        k, v, state = appended(state, k, v)
        groups, length, new = q.shape[1] // k.shape[1], k.shape[2], q.shape[2]
        slots = torch.arange(length)
        hidden = (slots > slots[-new:, None]).expand(len(q), q.shape[1], -1, -1)
        valid = torch.ones(len(q), length, dtype=torch.bool)
        if context.kv_valid is not None:
            valid = context.kv_valid.bool()
        before = torch.zeros(*k.shape[:3], dtype=torch.bool)
        is_first = self.dropped is None
        if self.dropped is not None:
            before[..., : self.dropped.shape[-1]] = self.dropped
        hidden = hidden | before.repeat_interleave(groups, 1)[:, :, None] | ~valid[:, None, None]
        scores = q @ k.repeat_interleave(groups, 1).mT / math.sqrt(q.shape[-1])
        scores = scores + bias(position, slots[-new:, None] - slots)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
        weights = weights * valid[:, None, -new:, None]  # queries that are padding do not count
        self.dropped = before
        self.tensors = *self._unrotated(q, context, position), k, v
        self._drop(weights, k, valid, is_first)
        return weights @ v.repeat_interleave(groups, 1), state

    def _unrotated(
        self, q: Tensor, context: Context, position: PositionTerms
    ) -> tuple[Tensor, Callable[[Tensor, int], Tensor]]:
        """Return the queries before positions, and a function of a vector and its row's length: the mean of
        its rotations at the positions that follow."""
        assert isinstance(position, BoundPosition)

        def rotate(x: Tensor, positions: Tensor) -> Tensor:
            at = Context(x.shape[2], x.shape[2], q_pos=positions, kv_pos=positions)
            return position.position.rotate(x, x, at, position.site)[0]

        def mean_rotation(x: Tensor, length: int) -> Tensor:
            future = getattr(self.policy, "future", 1)
            positions = torch.arange(length, length + future)
            return rotate(x.expand(1, 1, future, -1), positions).mean((0, 1, 2))

        own = torch.arange(context.offset, context.kv_len) if context.q_pos is None else context.q_pos
        return rotate(q, -own), mean_rotation

    def _drop(self, weights: Tensor, k: Tensor, valid: Tensor, is_first: bool) -> None:
        assert self.dropped is not None
        # Sums over the query heads of each key head.
        weights = weights.unflatten(1, (k.shape[1], -1)).sum(2)
        if isinstance(self.policy, H2O):
            past = self.weights if len(self.weights) else weights.new_zeros(*weights.shape[:2], 0)
            total = weights.sum(2)
            total[..., : past.shape[-1]] += past
            self.weights = total
        if is_first:
            self.lengths = valid.sum(-1).tolist()
        if not is_first and not self.policy.after_every_call:
            return
        for row in range(len(k)):
            for head in range(k.shape[1]):
                keys = [j for j in range(k.shape[2]) if valid[row, j] and not self.dropped[row, head, j]]
                kept = self._kept(keys, row, head, weights[row, head])
                for j in set(keys) - set(kept):
                    self.dropped[row, head, j] = True

    def _budget(self, row: int) -> int:
        """Return the budget, or the share of the row's prompt, and a key more than are always kept."""
        policy = self.policy
        if policy.ratio is None:
            assert policy.budget is not None
            return policy.budget
        least = {SnapKV: getattr(policy, "window", 0), H2O: 1, ExpectedAttention: getattr(policy, "sinks", 0)}
        return max(least[type(policy)] + 1, round(policy.ratio * self.lengths[row]))

    def _kept(self, keys: list[int], row: int, head: int, weights: Tensor) -> list[int]:
        """Return which of the keys of a head stay."""
        score = self._scores(keys, row, head, weights)
        return sorted(keys, key=lambda j: -score[j])[: min(self._budget(row), len(keys))]

    def _scores(self, keys: list[int], row: int, head: int, weights: Tensor) -> dict[int, float]:
        """Return the scores of the keys of a head, infinite for those that always stay."""
        policy = self.policy
        if isinstance(policy, SnapKV):
            before = weights[-policy.window :, : -policy.window].sum(0).tolist()
            far, half = range(-(policy.kernel // 2), policy.kernel // 2 + 1), len(before)
            near = [[before[j + i] if 0 <= j + i < half else 0.0 for i in far] for j in range(half)]
            pooled = [max(x) if policy.pooling == "max" else sum(x) / len(x) for x in near]
            score = {j: pooled[j] if j < half else math.inf for j in keys}
        elif isinstance(policy, H2O):
            last = keys[-(self._budget(row) - self._budget(row) // 2) :]
            score = {j: math.inf if j in last else float(self.weights[row, head, j]) for j in keys}
        else:
            assert isinstance(policy, ExpectedAttention)
            score = self._expected(policy, keys, row, head)
        return score

    def _expected(self, policy: ExpectedAttention, keys: list[int], row: int, head: int) -> dict[int, float]:
        """Return E[exp(q k scale)] of each key, as a share, times |v|; the mean over the query heads."""
        q, rotated, k, v = self.tensors
        scale, first = q.shape[-1] ** -0.5, k.shape[2] - q.shape[2]
        shares = torch.zeros(len(keys), dtype=q.dtype)
        groups = q.shape[1] // k.shape[1]
        own = k[row, head, keys]
        first_share = min(policy.sinks, len(keys))  # the sinks have no part in the softmax
        for query_head in range(head * groups, (head + 1) * groups):
            sample = q[row, query_head, [j - first for j in keys[policy.sinks :]]]
            covariance = (sample - sample.mean(0)).T @ (sample - sample.mean(0)) / len(sample)
            # The mean over positions of R m, and of R C R^T column by column and row by row.
            mean = rotated(sample.mean(0), len(keys))
            turned = torch.stack([rotated(column, len(keys)) for column in covariance.T], 1)
            turned = torch.stack([rotated(line, len(keys)) for line in turned])
            exponent = own @ mean * scale + ((own @ turned) * own).sum(-1) * scale**2 / 2
            shares[first_share:] += exponent[first_share:].softmax(0) / groups
        score = dict(zip(keys, (shares * v[row, head, keys].norm(dim=-1)).tolist()))
        return score | dict.fromkeys(keys[: policy.sinks], math.inf)


class Competing(Dense):
    """The same for `ada`: the keys of all heads compete, and a part `alpha` of the budget is a head's."""

    def __init__(self, policy: DroppingPolicy, alpha: float):
        super().__init__(policy)
        self.alpha = Fraction(str(alpha))

    def _drop(self, weights: Tensor, k: Tensor, valid: Tensor, is_first: bool) -> None:
        if not is_first:
            return
        assert self.dropped is not None
        self.lengths = valid.sum(-1).tolist()
        weights = weights.unflatten(1, (k.shape[1], -1)).sum(2)
        heads = range(k.shape[1])
        for row in range(len(k)):
            keys = [j for j in range(k.shape[2]) if valid[row, j]]
            budget = min(self._budget(row), len(keys))
            scores = [self._scores(keys, row, head, weights[row, head]) for head in heads]
            everything = sorted((-scores[head][j], head, j) for head in heads for j in keys)
            won = [head for _, head, _ in everything[: budget * len(heads)]]
            exact = [(1 - self.alpha) * won.count(head) + self.alpha * budget for head in heads]
            counts = [int(x) for x in exact]
            largest = sorted(heads, key=lambda head: counts[head] - exact[head])
            for head in largest[: budget * len(heads) - sum(counts)]:
                counts[head] += 1
            for head in heads:
                best = sorted(keys, key=lambda j, score=scores[head]: -score[j])
                for j in best[counts[head] :]:
                    self.dropped[row, head, j] = True
