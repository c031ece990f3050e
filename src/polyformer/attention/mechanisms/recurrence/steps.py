"""Several steps of the delta rule for each token: a product of Householder matrices instead of one.

    S_t,0 = exp(g_t) S_(t-1),n
    S_t,i = S_t,(i-1) - b_ti k_ti (S_t,(i-1)^T k_ti - v_ti)^T        i = 1 .. n        y_t = S_t,n^T q_t

Step i multiplies the state by 1 - b_ti k_ti k_ti^T. For a unit key and b_ti = 2 that is a reflection, and two
reflections make a rotation, which no single step does. A permutation of n + 1 elements is at most n exchanges
of two, so that n steps track it.

The fast form has n tokens for each token: the first of them decays the state, and the last one is read. All
forms of `scan` compute these tokens. Siems et al. 2025 (DeltaProduct).
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.mechanisms.recurrence.fused_scan import Scan
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs


@dataclasses.dataclass(frozen=True)
class StepInputs(ScanInputs):
    """The tokens of a recurrence with n steps for each: k [B, G, T, n, D], v [B, H, T, n, Dv] and b
    [B, H, T, n, 1]."""

    @staticmethod
    def of(tokens: ScanInputs, steps: int) -> "StepInputs":
        """Return the inputs with the heads of all steps, k [B, n G, T, D] and v [B, n H, T, Dv], by steps.

        tokens.erase: [B, H, T, n].
        """
        k, v = (x.unflatten(1, (steps, -1)).movedim(1, 3) for x in (tokens.k, tokens.v))
        assert tokens.erase is not None
        return StepInputs(tokens.q, k, v, tokens.decay, tokens.erase.unsqueeze(-1), tokens.starts)

    def as_tokens(self) -> ScanInputs:
        """Return T n tokens of one step."""
        assert self.erase is not None
        more = self.k.shape[3] - 1
        q = F.pad(self.q.unsqueeze(3), (0, 0, more, 0)).flatten(2, 3)
        decay = None if self.decay is None else F.pad(self.decay.unsqueeze(3), (0, 0, 0, more)).flatten(2, 3)
        starts = None if self.starts is None else F.pad(self.starts.unsqueeze(2), (0, more)).flatten(1)
        k, v, erase = (x.flatten(2, 3) for x in (self.k, self.v, self.erase))
        return ScanInputs(q, k, v, decay, erase, starts)


def step_recurrence(tokens: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, Dv] and the last state [B, H, D, Dv], step by step: the definition."""
    outputs, tokens = [], tokens.by_heads()
    assert tokens.erase is not None
    for t in range(tokens.q.shape[2]):
        if tokens.starts is not None:
            state = state * ~tokens.starts[:, t].view(-1, 1, 1, 1)
        if tokens.decay is not None:
            state = state * tokens.decay[:, :, t].exp().unsqueeze(-1)
        for i in range(tokens.k.shape[3]):
            k, v = tokens.k[:, :, t, i].unsqueeze(-1), tokens.v[:, :, t, i].unsqueeze(-2)
            state = state - tokens.erase[:, :, t, i].unsqueeze(-1) * k * (k.mT @ state - v)
        outputs.append(tokens.q[:, :, t].unsqueeze(-2) @ state)
    return torch.cat(outputs, 2), state


def step_scan(scan: Scan) -> Scan:
    """Return the same as `step_recurrence`, by the scan of T n tokens."""

    def run(tokens: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(tokens, StepInputs)
        if tokens.q.shape[2] == 1:
            return step_recurrence(tokens, state)
        steps = tokens.k.shape[3]
        y, state = scan(tokens.as_tokens(), state)
        return y[:, :, steps - 1 :: steps], state

    return run
