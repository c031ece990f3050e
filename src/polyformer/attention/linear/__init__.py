"""Attention in time linear in length, by feature maps phi whose products estimate softmax.

    y_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j)

Read `definition` (the equation over all pairs) and `feature_maps` (phi of Performer and RFA) first, then the
members `performer` and `rfa`. The fast form: `feature_attention` (entry and state), `documents` (packed
rows), `causal` with its forward and backward passes, `noncausal`, and what they share, `sums` and `weights`.
"""
