"""Linear recurrences: mechanisms that keep a matrix of fixed size instead of the keys and values of the past.

    S_t = exp(g_t) S_(t-1) - b_t k_t (k_t^T exp(g_t) S_(t-1)) + k_t v_t^T        y_t = S_t^T q_t

Read `scan` first: the recurrence, and the same in chunks. The members differ in their gates g and b, and in
what surrounds them (`base`: short convolutions, output norm and gate); `members` and `delta` have the tables
of their equations. `rank_one` is the scan of RWKV-7.
"""
