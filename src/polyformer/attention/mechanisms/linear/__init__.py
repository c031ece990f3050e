"""Linear attention: feature maps phi with products that estimate softmax, in time linear in length.

    y_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j)

Read `definition` (the equation over all pairs) and `feature_maps` (phi of Performer and RFA) first, then the
members `performer` and `rfa`. The fast form: `feature_attention` (entry and state), `documents` (packed
rows), `causal`, `noncausal`, and their sums over keys, `sums`.
"""
