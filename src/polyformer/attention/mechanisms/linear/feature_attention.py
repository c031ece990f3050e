"""Linear attention by feature maps: the sums over keys are computed once, or pass from token to token.

    y_i = sum_j w_ij (phi(q_i) . phi(k_j)) v_j / sum_j w_ij (phi(q_i) . phi(k_j))
    w_ij = exp(weight_j + decay_(j+1) + ... + decay_i)        over the keys j that query i attends to

Token by token it is the recurrence S = e^decay S + e^weight v phi(k)^T, z = e^decay z + e^weight phi(k),
y = S phi(q) / (z . phi(q)). Documents in one row are computed one after another.

Katharopoulos et al. 2020, section 3. Cost: 2 M (D + 2 Dv) products per token and head, plus half a run's
M + Dv in the causal form; the state has M (Dv + 1) numbers per head, independent of the number of tokens.
"""

import dataclasses

from torch import Tensor

from polyformer.attention.functional.plan import refuse_recording
from polyformer.attention.mechanisms.linear.context_parallel import context_parallel_attention
from polyformer.attention.mechanisms.linear.definition import definition
from polyformer.attention.mechanisms.linear.documents import (
    attend_causal_documents,
    attend_document,
    attend_noncausal_documents,
)
from polyformer.attention.mechanisms.linear.feature_maps import Kernel
from polyformer.attention.mechanisms.linear.inputs import LinearInputs
from polyformer.attention.mechanisms.linear.sums import Sums, empty_sums
from polyformer.core.errors import InputError
from polyformer.core.ops.precision import without_autocast
from polyformer.core.ops.softmax import recording
from polyformer.core.sequence.context import Context
from polyformer.core.state import State

NO_SCORE_BIAS_REASON = (
    "its keys are summed before queries read them: biases of distances need a Fourier transform of every "
    "feature times every value, measured slower than dense attention up to 16,384 tokens, and keep no state"
)
"""The reason why linear attention accepts no position scheme that changes scores.

With b[i - j] added to scores, numerators and denominators are Toeplitz products, by FFT in n log n (Luo et
al. 2021, section 3.2): one of M (Dv + 1) sequences of 2 n numbers. docs/results/mechanisms.md has its time. A
decoding step would need all keys again, because every token changes the distances of all keys.
"""


@dataclasses.dataclass(frozen=True)
class LinearState(State):
    """S [B, H, Dv, M] and z [B, H, M], both times e^-top; top and mass [B, H]. None without tokens."""

    sums: Tensor | None = None
    norms: Tensor | None = None
    top: Tensor | None = None
    mass: Tensor | None = None

    def past(self, rows: int, heads: int, width: int, kernel: Kernel) -> Sums:
        """Return the sums with rows and heads merged into one dimension, for values of `width` dimensions."""
        if self.sums is None or self.norms is None or self.top is None or self.mass is None:
            return empty_sums(rows * heads, width, kernel)
        return Sums(*(x.flatten(0, 1) for x in (self.sums, self.norms, self.top, self.mass)))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel,
    context: Context,
    state: State | None = None,
    weight: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, LinearState | None]:
    """Return the output [B, H, Tq, Dv] in the precision of the kernel, and the next state, if any.

    q [B, H, Tq, D] and the keys and values after the state's, k [B, Hkv, T, D], v [B, Hkv, T, Dv].
    weight, decay: [B, H, T] log weights of the keys, and log decays before each token (causal only).
    """
    assert isinstance(state, LinearState | None)
    with without_autocast(q):
        inputs = LinearInputs.of(q, k, v, kernel, context, weight, decay)
        # Weights of single tokens exist only in the definition over all pairs.
        if recording():
            refuse_recording(context)
            if state is not None and state.sums is not None:
                raise InputError(
                    "output_attentions: the state of linear attention has no weights of single tokens; "
                    "pass the whole input at once"
                )
            return definition(inputs, context), None
        if context.shard is not None:
            return context_parallel_attention(inputs, context), None
        # Sums have rows and heads in one axis N = B H.
        rows, heads = q.shape[:2]
        past = (state or LinearState()).past(rows, heads, v.shape[3], kernel)
        if context.q_doc is None or context.kv_doc is None:
            out, past = attend_document(inputs, past)
        # Several documents in a row: only the first may continue the state.
        elif inputs.causal:
            out, past = attend_causal_documents(inputs, context.kv_doc, context.kv_len - k.shape[2], past)
        else:
            out = attend_noncausal_documents(inputs, context.q_doc, context.kv_doc, past)
        if state is None:
            return out, None
        return out, LinearState(*(x.unflatten(0, (rows, heads)) for x in past))
