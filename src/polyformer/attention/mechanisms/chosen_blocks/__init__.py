"""Softmax attention over blocks of keys that each query chooses by content.

    s_ib = q_i . mean_(j in b) k_j        a query sees its near blocks and the best others

Read `choice` first: the blocks of a call and the choice. `base` is the attention: the definition is dense
attention with the mask of the choice, and the fast form (`gathered`) computes only the chosen pairs. The
members `moba` and `top_blocks` differ in the blocks that are always near; `nsa` adds two branches.
"""
