# %% [markdown]
# # Invent an attention in ten lines
#
# Three inventions, each of a different kind: *who* may see whom (a pattern), *how much* a distance costs (a
# position scheme), and *how* weights come about (a mechanism). Each is ten lines, each is at once a part of
# any model, and each is put to a test that the others might fail.

# %%
import dataclasses
import math

import torch

import polyformer
from polyformer import Relative, Window, attend
from polyformer.attention.mechanisms.base import Mechanism, MechanismConfig
from polyformer.attention.patterns import ByDistance
from polyformer.attention.positions import Position, PositionConfig

torch.manual_seed(0)

# %% [markdown]
# ## 1. Who: powers of two
#
# A token sees itself and the tokens 1, 2, 4, 8, .. before it: $S_i = \{i\} \cup \{i - 2^m\}$. A pattern of
# distances says how far it reaches and which distances it sees; layouts, masks, documents, caches and
# gradients follow.


# %%
@dataclasses.dataclass(frozen=True)
class PowersOfTwo(ByDistance):
    """Keys at distances of 0 and of powers of two, as far as `reach`."""

    reach: int = 4096

    def ends(self):
        """From `reach` before to none after."""
        return self.reach, 0

    def sees(self, distance):
        """A power of two has a single bit."""
        return distance & (distance - 1) == 0


# %% [markdown]
# Is it right? The equation over all pairs says:

# %%
q, k, v = (torch.randn(1, 2, 300, 16, dtype=torch.float64) for _ in range(3))
i, j = torch.arange(300)[:, None], torch.arange(300)
distance = i - j
allowed = (distance == 0) | ((distance > 0) & (distance.clamp_min(1).log2() % 1 == 0))
scores = (q @ k.mT / 4).masked_fill(~allowed, -math.inf)
difference = (scores.softmax(-1) @ v - attend(q, k, v, pattern=PowersOfTwo())).abs().max()
print(f"differs from the equation by {difference:.0e}")
print(f"keys of the last query: {int(allowed[-1].sum())} of 300")

# %% [markdown]
# ## 2. Is it any good? A test that windows fail
#
# Rows of random tokens that repeat with a period of 17: the next token is known to a query that sees the
# token 16 before it. A window of as many keys does not, in one layer. Trained on the same rows for the same
# number of steps:

# %%
PERIOD, VOCABULARY = 17, 50


def rows(batch: int) -> torch.Tensor:
    """Random tokens, repeated with the period: [batch, 4 periods]"""
    return torch.randint(VOCABULARY, (batch, PERIOD)).repeat(1, 4)


def trained(steps: int = 120, **parts) -> tuple[float, torch.nn.Module]:
    """A decoder of one layer with these parts, and how many tokens from the second period on it predicts."""
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    model = polyformer.create_model("decoder-small", num_hidden_layers=1, dropout=0.0, **sizes, **parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(steps):
        ids = rows(16)
        labels = ids.clone()
        labels[:, :PERIOD] = -100  # the first period cannot be known
        loss = model(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = rows(64)
    with torch.no_grad():
        guesses = model.eval()(ids).logits.argmax(-1)
    return (guesses[:, PERIOD:-1] == ids[:, PERIOD + 1 :]).float().mean().item(), model


keys = int(allowed[-1, -17:].sum())
for name, pattern in {"powers of two": PowersOfTwo(16), f"a window of {keys}": Window(keys - 1, 0)}.items():
    share, _ = trained(attention=pattern, position="t5")
    print(f"{name}: {share:.0%} of the tokens that can be known")

# %% [markdown]
# Six keys with the right one among them are worth more than the six nearest. A pattern is a bet on which
# distances matter: with a period of 18 this one would be lost, for 17 is no power of two.
#
# ## 3. How much: a bias that forgets slowly
#
# ALiBi lowers scores linearly with the distance. Suppose forgetting should be slower far away: minus the
# logarithm of the distance, with a learned strength for each head. Terms that depend on the distance alone
# are a table over distances, here [heads, distances], and every backend takes them.


# %%
class LogBias(Position):
    """score_ij - strength_h log(1 + |i - j|)"""

    def __init__(self, heads):
        super().__init__()
        self.strength = torch.nn.Parameter(torch.linspace(0.2, 2.0, heads))

    def relative(self, q, k, context, site):
        """The bias of every distance of this call."""
        first, last = context.distances
        distances = torch.arange(first, last + 1, dtype=q.dtype, device=q.device).abs()
        return Relative(first=first, bias=-self.strength[:, None] * distances.log1p())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogBiasConfig(PositionConfig):
    """Logarithmic forgetting."""

    kind = "log_bias"

    def build(self, shape):
        """The module for the heads of a stack."""
        return LogBias(shape.num_heads)


model = polyformer.create_model("decoder-small", position="log_bias", attention=Window(64, 0))
model(torch.randint(1000, (1, 200)), labels=torch.randint(1000, (1, 200))).loss.backward()
(strength,) = [parameter for name, parameter in model.named_parameters() if name.endswith("strength")]
print("strengths:", *(f"{value:.2f}" for value in strength.tolist()))
print("gradients:", *(f"{value:.4f}" for value in strength.grad.tolist()))

# %% [markdown]
# ## 4. How: weights that do not compete
#
# In a softmax the weights of a query sum to 1: one key gains what others lose. What if each key were judged
# by itself?
#
# $$
# y_i = \sum_{j \le i} \sigma\!\left(\frac{q_i \cdot k_j}{\sqrt{D}} - \log n\right) v_j
# $$
#
# The $\log n$ makes $n$ indifferent keys weigh 1 together at the beginning, as in a softmax.


# %%
class SigmoidAttention(Mechanism):
    """Each key weighed by itself."""

    def forward(self, q, k, v, context, state, position):
        """q, k, v [batch, heads, tokens, width] -> the same of y, and no state."""
        n = k.shape[2]
        weights = torch.sigmoid(q @ k.mT / math.sqrt(q.shape[-1]) - math.log(n))
        return weights.tril() @ v, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidConfig(MechanismConfig):
    """Says what it cannot do, so that a model refuses by name what it would get wrong."""

    kind = "sigmoid"
    supports_packing = supports_kv_cache = supports_score_bias = False

    def build(self, num_heads, head_size):
        """Without parameters."""
        return SigmoidAttention()


for name in ("softmax", "sigmoid"):
    share, model = trained(attention=name, position="rope", steps=150)
    print(f"{name}: {share:.0%}")

# %% [markdown]
# What it declared is answered before anything is computed:

# %%
try:
    polyformer.create_model("decoder-small", attention="sigmoid", position="t5")
except polyformer.InputError as error:
    print(error)

# %% [markdown]
# ## From an idea to a member
#
# A file with these classes is a member wherever `--import mine.py` stands on the command line, and
# `polyformer list` shows it. What is left to do is what tests of the library ask of every member, and can
# ask of yours: padding that changes nothing, documents kept apart, decoding token by token that equals one
# pass. `examples/own-member` is an installable package with one of each kind that passes them. How the
# parts meet is in [the design](../design.md#adding-a-member).
