# %% [markdown]
# # Why positions are not simply counted
#
# Attention needs the positions of its tokens. The simplest schemes add the number $t$ of a token times a
# learned vector $v$, or $t / (T - 1)$ times $v$, so that the last of $T$ tokens has the number 1. We train
# both and sinusoids on a task that needs positions: **write the token that stood three places before**.

# %%
import dataclasses
import os

import torch

import polyformer
from polyformer.attention.positions import Position, PositionConfig

# %% [markdown]
# A scheme is a configuration and a module. `embed` returns the input of a layer with its positions.


# %%
@dataclasses.dataclass(frozen=True, kw_only=True)
class CountedConfig(PositionConfig):
    """The number of each token, or with `divided` the number as a share of the last number."""

    divided: bool = False
    kind = "counted"

    def build(self, shape):
        """Return the scheme."""
        return Counted(shape.input_size, self.divided)


class Counted(Position):
    """x_t + t v, or x_t + t / (T - 1) v, with a learned vector v, at the first layer."""

    def __init__(self, width, divided):
        super().__init__()
        self.divided, self.vector = divided, torch.nn.Parameter(torch.randn(width))

    def embed(self, x, pos, layer):
        """Return x [B, T, E] with the numbers of the positions added."""
        number = pos / pos.max().clamp_min(1) if self.divided else pos
        return x if layer else x + number[..., None] * self.vector


# %% [markdown]
# Texts are random and have 16 to 32 tokens, so that $T$ changes from batch to batch.


# %%
def right(position, seed, steps=200):
    """Train a small decoder and return the share of right tokens in new texts."""
    torch.manual_seed(seed)
    model = polyformer.create_model("decoder-tiny", vocab_size=16, position=position, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = torch.randint(4, 16, (16, int(torch.randint(16, 33, ()))))
        logits = model(ids).logits[:, 3:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, :-3].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = torch.randint(4, 16, (64, 32))
    return float((model.eval()(ids).logits[:, 3:].argmax(-1) == ids[:, :-3]).float().mean())


for position in ("sinusoidal", "counted", "counted(divided=true)", "none"):
    shares = [f"{right(position, seed):.0%}" for seed in range(int(os.environ.get("SEEDS", "2")))]
    print(f"{position:22} {', '.join(shares)} right, by seed")

# %% [markdown]
# Both schemes are worse than a decoder without positions, which knows the order only from its causal mask.
# By chance one of twelve tokens is right.
#
# - $t v$ grows without a bound: late in a text it is tens of times as long as the sinusoids, and after the
#   norm of a layer all tokens look alike.
# - $t / (T - 1)$ is bounded, but three places are another distance in every length $T$, and neighbours in a
#   long text have nearly the same vector.
# - Sinusoids are bounded, and $PE(t + 3)$ is the same linear map of $PE(t)$ for every $t$ and $T$, which one
#   head learns.
