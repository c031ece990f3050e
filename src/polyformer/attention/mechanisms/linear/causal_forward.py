"""The forward pass of a run of a causal scan.

With u = phi(q) and f = phi(k) without their scales, S and z the sums before the run, and weights relative to
the running maximum (`weights.py`): w_ij of the pairs, a_i of the past, b_j of the keys in the next sums, c of
the past in the next sums, the queries i and keys j of a run give

    s_ij = w_ij (u_i . f_j)                                    scores
    n_i = sum_j s_ij v_j + a_i S u_i                           numerators
    t_i = sum_j s_ij + a_i z . u_i                             denominators
    y_i = n_i / t_i
    S' = sum_j b_j v_j f_j^T + c S        z' = sum_j b_j f_j + c z
"""

from torch import Tensor

from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.mechanisms.linear.sums import Sums, matrix_vector, weighted_sum
from polyformer.attention.mechanisms.linear.weights import invert_denominators, run_weights
from polyformer.core.ops.batched_products import product


class Run:
    """A run of C tokens of N heads: their features, the weights of its keys, and the scores of its pairs."""

    def __init__(
        self,
        kernel: Kernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        decay: Tensor | None,
        top: Tensor,
    ):
        self.kernel, self.q, self.k, self.v = kernel, q, k, v
        (self.phi_q, _), (self.phi_k, scale) = kernel.values(q), kernel.features(k)
        # The scale of a key is part of its weight; the scale of a query cancels.
        self.weights = run_weights(weight + scale, decay, top)
        self.scores = product(self.phi_q, self.phi_k.mT).mul_(self.weights.pairs)


def run_forward(run: Run, past: Sums) -> tuple[Tensor, Tensor, Tensor, Sums]:
    """Return the output [N, C, Dv], the results of `invert_denominators`, and the next sums."""
    w = run.weights
    total = run.scores.sum(-1).addcmul_(matrix_vector(run.phi_q, past.denominators), w.past)
    # The denominators if every u . f were 1, for their lower bound.
    mass = w.pairs.sum(-1).addcmul_(past.mass.unsqueeze(-1), w.past)
    inverse, unraised = invert_denominators(total, mass, run.kernel.least)
    number = product(run.scores, run.v)
    number.addcmul_(product(run.phi_q, past.numerators.mT), w.past.unsqueeze(-1))
    weighted_v = (run.v * w.keys.unsqueeze(-1)).mT.contiguous()
    numerators = product(weighted_v, run.phi_k).add_(past.numerators * w.kept.view(-1, 1, 1))
    denominators = weighted_sum(w.keys, run.phi_k).addcmul_(past.denominators, w.kept.unsqueeze(-1))
    out = number.mul_(inverse.unsqueeze(-1))
    return out, inverse, unraised, Sums(numerators, denominators, w.top, mass[:, -1])
