"""The backward pass of a run of a causal scan, with the symbols of `causal_forward.py`.

The gradients follow from grad n_i and grad t_i of the run's numerators and denominators, and grad S', grad z'
of the next sums:

    grad s_ij = grad n_i . v_j + grad t_i                      of the scores
    g_ij      = w_ij grad s_ij                                 of the products u_i . f_j
    grad u_i  = sum_j g_ij f_j + a_i (S^T grad n_i + grad t_i z)
    grad f_j  = sum_i g_ij u_i + b_j (grad S'^T v_j + grad z')
    grad v_j  = sum_i s_ij grad n_i + b_j grad S' f_j
    grad S    = sum_i a_i grad n_i u_i^T + c grad S'
    grad z    = sum_i a_i grad t_i u_i   + c grad z'

Log weights. Every contribution of key j is proportional to e^(weight_j) f_j, so by Euler's theorem

    grad weight_j = f_j . grad f_j                             and the same for the scale of phi(k_j)

Decays. With F_i the sum of the decays up to token i, w_ij = exp(weight_j - F_j + F_i), and the sums after the
last token T contain e^(F_T - F_j). So

    grad F_i     = u_i . grad u_i - f_i . grad f_i,    and for i = T also <grad S_T, S_T> + <grad z_T, z_T>
    grad decay_t = sum over i >= t of grad F_i
"""

from typing import NamedTuple

from torch import Tensor

from polyformer.attention.mechanisms.linear.causal_forward import Run
from polyformer.attention.mechanisms.linear.sums import weighted_sum
from polyformer.core.ops.batched_products import product


class RunGradients(NamedTuple):
    """The gradients of q, k, v, and u . grad u [N, C], f . grad f [N, C] of every query and key."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_query: Tensor
    log_key: Tensor


def run_backward(
    run: Run,
    grad_number: Tensor,
    grad_total: Tensor,
    past: tuple[Tensor, Tensor],
    grad_next: tuple[Tensor, Tensor],
) -> tuple[RunGradients, tuple[Tensor, Tensor]]:
    """Return the gradients of a run's inputs, and grad (S, z) of the sums before it.

    Args:
        run: the run, recomputed from its inputs.
        grad_number, grad_total: grad n and grad t.
        past: (S, z) before the run.
        grad_next: grad (S', z') after the run.
    """
    w, (past_s, past_z), (grad_s, grad_z) = run.weights, past, grad_next
    past_share, key_share = w.past.unsqueeze(-1), w.keys.unsqueeze(-1)
    # g_ij = w_ij (grad n_i . v_j + grad t_i)
    grad_pairs = product(grad_number, run.v.mT).add_(grad_total.unsqueeze(-1)).mul_(w.pairs)
    grad_number_past, grad_total_past = grad_number * past_share, grad_total * w.past
    # grad u_i: over the keys of the run, then over the sums of the past.
    grad_phi_q = product(grad_pairs, run.phi_k).add_(product(grad_number_past, past_s))
    grad_phi_q.addcmul_(grad_total_past.unsqueeze(-1), past_z.unsqueeze(1))
    # grad f_j: over the queries of the run, then through the next sums.
    grad_phi_k = product(grad_pairs.mT.contiguous(), run.phi_q)
    grad_phi_k.add_(product(run.v * key_share, grad_s)).addcmul_(key_share, grad_z.unsqueeze(1))
    # grad v_j, over the same two paths.
    grad_v = product(run.scores.mT.contiguous(), grad_number)
    grad_v.addcmul_(product(run.phi_k, grad_s.mT), key_share)
    grad_log_query = (run.phi_q * grad_phi_q).sum(-1)
    grad_log_key = (run.phi_k * grad_phi_k).sum(-1)
    # grad S and grad z of the sums before the run.
    grad_past_s = product(grad_number_past.mT.contiguous(), run.phi_q)
    grad_past_z = weighted_sum(grad_total_past, run.phi_q).addcmul_(grad_z, w.kept.unsqueeze(-1))
    gradients = RunGradients(
        run.kernel.backward(run.q, run.phi_q, grad_phi_q, None),
        run.kernel.backward(run.k, run.phi_k, grad_phi_k, grad_log_key),
        grad_v,
        grad_log_query,
        grad_log_key,
    )
    return gradients, (grad_past_s.add_(grad_s * w.kept.view(-1, 1, 1)), grad_past_z)


def grad_decay(grad_log_query: Tensor, grad_log_key: Tensor, grad_last: Tensor) -> Tensor:
    """Return grad decay_t [N, T]; grad_last [N] = <grad S_T, S_T> + <grad z_T, z_T>."""
    # A reversed cumulative sum: over all i >= t.
    return (grad_log_query - grad_log_key).flip(-1).cumsum(-1).flip(-1) + grad_last.unsqueeze(-1)
