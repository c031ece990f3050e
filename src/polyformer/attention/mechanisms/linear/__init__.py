"""Linear attention: feature maps phi with products that estimate softmax, in time linear in length.

    y_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j)

Read `feature_maps` (phi of Performer and RFA) and `sums` (the equation over all pairs, and the sums over
keys) first, then the members in `feature_attention`. The fast form: `passes`, forward and backward, and
`context_parallel` for several processes.
"""
