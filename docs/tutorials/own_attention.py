# %% [markdown]
# # Invent an attention in ten lines
#
# We invent three parts: a pattern (*which* pairs may attend), a position scheme (*how much* a distance
# costs), and a mechanism (*how* weights are computed). Each has ten lines, works in any model, and gets a
# test that shows its use.

# %%
import dataclasses
import math

import torch

import polyformer
from polyformer import Relative, Window, attend
from polyformer.attention.mechanisms import PairWeights, PairWeightsConfig
from polyformer.attention.patterns import ByDistance
from polyformer.attention.positions import Position, PositionConfig

torch.manual_seed(0)

# %% [markdown]
# ## 1. A pattern: powers of two
#
# A token sees itself and the tokens 1, 2, 4, 8, .. before it: $S_i = \{i\} \cup \{i - 2^m\}$. A `ByDistance`
# pattern defines its reach and its distances. Layouts, masks, packed documents, caches and gradients then
# work.


# %%
@dataclasses.dataclass(frozen=True)
class PowersOfTwo(ByDistance):
    """Keys at distance 0 and at powers of two, up to `before`."""

    before: int = 4096

    def ends(self):
        """Return the numbers of keys before and after the query."""
        return self.before, 0

    def sees(self, distance):
        """Return whether the distance is 0 or a power of two, which has a single bit."""
        return distance & (distance - 1) == 0


# %% [markdown]
# We compare it with the equation over all pairs:

# %%
q, k, v = (torch.randn(1, 2, 300, 16, dtype=torch.float64) for _ in range(3))
i, j = torch.arange(300)[:, None], torch.arange(300)
distance = i - j
allowed = (distance == 0) | ((distance > 0) & (distance.clamp_min(1).log2() % 1 == 0))
scores = (q @ k.mT / 4).masked_fill(~allowed, -math.inf)
difference = (scores.softmax(-1) @ v - attend(q, k, v, pattern=PowersOfTwo())).abs().max()
print(f"difference from the equation: {difference:.0e}")
print(f"keys of the last query: {int(allowed[-1].sum())} of 300")

# %% [markdown]
# ## 2. A test that windows fail
#
# The rows repeat 17 random tokens. A query that sees the token 16 positions before it can predict the next
# token. A window with the same number of keys does not reach that token in one layer. We train both on the
# same rows for the same number of steps:

# %%
PERIOD, VOCABULARY = 17, 50


def rows(batch: int) -> torch.Tensor:
    """Generate random tokens, repeated with the period: [batch, 4 periods]."""
    return torch.randint(VOCABULARY, (batch, PERIOD)).repeat(1, 4)


def trained(steps: int = 120, **parts) -> tuple[float, torch.nn.Module]:
    """Train a one-layer decoder; return its accuracy after the first period, and the model."""
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    model = polyformer.create_model("decoder-small", num_hidden_layers=1, dropout=0.0, **sizes, **parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(steps):
        ids = rows(16)
        labels = ids.clone()
        labels[:, :PERIOD] = -100  # the first period is random
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
    print(f"{name}: {share:.0%} of the predictable tokens")

# %% [markdown]
# Six keys that include the correct key are better than the six nearest keys. A pattern is a bet on the
# distances that matter. With a period of 18 this pattern would fail, because 17 is not a power of two.
#
# ## 3. A position scheme: slow forgetting
#
# ALiBi lowers scores linearly with the distance. We want slower forgetting at large distances: minus the
# logarithm of the distance, with a learned strength per head. A term that depends only on the distance is a
# table, here [heads, distances]. Every backend supports it.


# %%
class LogBias(Position):
    """score_ij - strength_h log(1 + |i - j|)"""

    def __init__(self, heads):
        super().__init__()
        self.strength = torch.nn.Parameter(torch.linspace(0.2, 2.0, heads))

    def relative(self, q, k, context, site):
        """Return the bias of every distance in this call."""
        first, last = context.distances
        distances = torch.arange(first, last + 1, dtype=q.dtype, device=q.device).abs()
        return Relative(first=first, bias=-self.strength[:, None] * distances.log1p())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogBiasConfig(PositionConfig):
    """Logarithmic forgetting."""

    kind = "log_bias"

    def build(self, shape):
        """Return the module for the heads of a stack."""
        return LogBias(shape.num_heads)


model = polyformer.create_model("decoder-small", position="log_bias", attention=Window(64, 0))
model(torch.randint(1000, (1, 200)), labels=torch.randint(1000, (1, 200))).loss.backward()
(strength,) = [parameter for name, parameter in model.named_parameters() if name.endswith("strength")]
print("strengths:", *(f"{value:.2f}" for value in strength.tolist()))
print("gradients:", *(f"{value:.4f}" for value in strength.grad.tolist()))

# %% [markdown]
# ## 4. A mechanism: weights that do not compete
#
# In a softmax the weights of a query sum to 1, so the keys compete. Here each weight is independent:
#
# $$
# y_i = \sum_j \sigma\!\left(\frac{q_i \cdot k_j}{\sqrt{D}} - \log n_i\right) v_j
# $$
#
# The sum is over the $n_i$ keys that query $i$ sees. With $\log n_i$ its initial weights sum to about 1, as
# in a softmax. The length of the row would be wrong for $n_i$: it counts later tokens, padding and other
# documents, so that the output of a text would depend on the rest of the batch.
#
# We write only the weights. `PairWeights` computes the scores, knows which pairs are allowed, and keeps the
# cache.


# %%
class SigmoidAttention(PairWeights):
    """Sigmoid attention: an independent weight for each key."""

    def weights(self, scores, allowed):
        """Return the weights [batch, heads, queries, keys]; other pairs than the allowed get 0."""
        n = allowed.sum(-1, keepdim=True).clamp_min(1)  # padding sees no key
        return torch.sigmoid(scores - n.log())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidConfig(PairWeightsConfig):
    """Sigmoid attention, with an optional pattern."""

    kind = "my_sigmoid"

    def build(self, num_heads, head_size):
        """Return the module, which has no parameters."""
        return SigmoidAttention(self)


for name in ("softmax", "my_sigmoid"):
    share, model = trained(attention=name, position="rope", steps=150)
    print(f"{name}: {share:.0%}")

# %% [markdown]
# The audit checks what is easily forgotten: padding, packed documents, later tokens, and the cache.

# %%
report = polyformer.audit(
    model, checks=["left padding", "padding content", "packing", "future", "prefix", "chunks"], length=20
)
print(report)

# %% [markdown]
# All three inventions work together, because each knows only its own part:

# %%
share, model = trained(attention=SigmoidConfig(pattern=PowersOfTwo(16)), position="log_bias", steps=300)
print(f"pattern, positions and mechanism together: {share:.0%}")

period = rows(1)[:, :PERIOD]
generated = model.generate(period, max_new_tokens=PERIOD, eos=[]).sequences[:, PERIOD:]
print(f"generated as in the period before: {(generated == period).float().mean():.0%}")

# %% [markdown]
# ## From an idea to a member
#
# Put the classes in a file and pass `--import mine.py` on the command line. They are then members, and
# `polyformer list` shows them. [Your own mechanism](../own_mechanism.md) has the whole file, the rules, and
# what to do if a mechanism does not weight pairs. The library's contract tests also run on your members:
# `examples/own-member` is an installable package with a member of each kind that passes them. [The
# design](../design.md#adding-a-member) explains how the parts fit together.
