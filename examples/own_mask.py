"""Your own attention mask: a FlexAttention `mask_mod`, combined with a pattern.

    python examples/own_mask.py

Each token attends to its own sentence and to the first token of every earlier sentence.
"""

import torch

from polyformer import Causal, attend, explain

torch.manual_seed(0)
TOKENS, SENTENCE = 1024, 32
q, k, v = (torch.randn(1, 4, TOKENS, 32, requires_grad=True) for _ in range(3))

# The sentence of each token. A mask_mod decides pair by pair and may read any tensor.
sentence = torch.arange(TOKENS) // SENTENCE


def sentences(b, h, q_idx, kv_idx):
    """Return True if the query may attend to the key."""
    own = sentence[q_idx] == sentence[kv_idx]
    return own | (kv_idx % SENTENCE == 0)


pattern = Causal() & sentences  # combine patterns and mask_mods by & and |
out = attend(q, k, v, pattern=pattern)
print(explain(q, k, v, pattern=pattern))

# The definition: dense softmax over the allowed pairs.
i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
allowed = (j <= i) & sentences(0, 0, i, j)
scores = (q @ k.transpose(-1, -2) / 32**0.5).masked_fill(~allowed, float("-inf"))
expected = scores.softmax(-1) @ v
print(f"pairs that are seen: {allowed.float().mean():.1%}")
print(f"largest difference from the definition: {(out - expected).abs().max():.1e}")

out.sum().backward()  # gradients work as in any attention
