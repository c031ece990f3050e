# %% [markdown]
# # What a kernel estimates
#
# Attention compares every query with every key: $n^2$ weights $e^{q \cdot k}$. If the weight were a plain
# product $\phi(q) \cdot \phi(k)$ of two vectors, the sums could be taken once for all queries, and the cost
# would be linear. It is not such a product, but the *mean* of one over random vectors. This page looks at
# that mean, at how far an estimate by finitely many vectors errs, and at what of attention survives it.

# %%
import math

import torch

from polyformer.attention.mechanisms import PerformerConfig
from polyformer.core.ops.random_directions import directions
from polyformer.core.sequence.context import Context

generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    """Independent numbers of N(0, 1)."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# %% [markdown]
# ## 1. A mean that is exact
#
# For $w \sim N(0, I)$ the mean of $e^{w \cdot x}$ is $e^{|x|^2 / 2}$. With $x = q + k$, and $|q + k|^2 =
# |q|^2 + 2\, q \cdot k + |k|^2$,
#
# $$
# e^{q \cdot k} = \operatorname{E}_w\!\left[\, e^{w \cdot q - |q|^2/2}\; e^{w \cdot k - |k|^2/2} \,\right]
# $$
#
# Both factors are positive, and each needs one vector alone. There is an older way: sines and cosines,
# whose mean is $\operatorname{E}[\cos(w \cdot (q - k))] = e^{-|q-k|^2/2}$.


# %%
def positive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """phi(x) [.., M] of the rows of w [M, D]"""
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(w))


def trigonometric(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """phi(x) [.., 2 M]"""
    a = x @ w.T
    return (
        (x.square().sum(-1, keepdim=True) / 2).exp() * torch.cat([a.cos(), a.sin()], -1) / math.sqrt(len(w))
    )


D = 16
q = normal(D)
q = q / q.norm()
k = 0.6 * q + 0.8 * torch.nn.functional.normalize(normal(D), dim=0)
print(f"e^(q.k) is {(q @ k).exp():.4f}; estimates of it:")
for count in (10, 100, 1000, 10_000, 100_000):
    w = normal(count, D)
    estimates = [(phi(q, w) @ phi(k, w)).item() for phi in (positive, trigonometric)]
    print(f"{count:7} features: positive {estimates[0]:.4f}, trigonometric {estimates[1]:.4f}")

# %% [markdown]
# Four times as many features halve the error, as with every mean.
#
# ## 2. Where each errs
#
# A weight is used relative to others, so errors should be relative too. Here is the error of 64 features in
# units of the true weight (the root of its mean square over 2,000 draws), for vectors of length 1 at
# several angles:

# %%
DRAWS, COUNT = 2000, 64


def relative_error(phi, angle: float, orthogonal: bool = False, length: float = 1.0) -> float:
    """Of an estimate for two vectors of this length and angle, in units of the true weight."""
    q, k = torch.zeros(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    q[0], k[0], k[1] = length, length * math.cos(angle), length * math.sin(angle)
    torch_generator = torch.Generator().manual_seed(1)
    w = directions(COUNT * DRAWS, D, orthogonal, torch_generator).double().view(DRAWS, COUNT, D)
    a_q, a_k = w @ q, w @ k
    if phi is positive:
        estimates = (a_q + a_k - (q @ q + k @ k) / 2).exp().mean(1)
    else:
        estimates = ((q @ q + k @ k) / 2).exp() * (a_q - a_k).cos().mean(1)
    true = (q @ k).exp()
    return ((estimates - true).square().mean().sqrt() / true).item()


print("angle   true weight   positive   trigonometric   positive, orthogonal")
for degrees in (0, 45, 90, 135, 180):
    angle = math.radians(degrees)
    true = math.exp(math.cos(angle))
    errors = [relative_error(positive, angle), relative_error(trigonometric, angle)]
    errors.append(relative_error(positive, angle, orthogonal=True))
    print(f"{degrees:5}   {true:11.2f}   {errors[0]:8.2f}   {errors[1]:13.2f}   {errors[2]:20.2f}")

# %% [markdown]
# Trigonometric features are perfect where query and key are equal and hopeless where they are opposed:
# there the weight is smallest, and its estimate is a difference of large numbers, which may even be
# negative. Most weights of attention are small ones. That is the case for *positive* features (Choromanski
# et al. 2021): they err *least* where the weight is small. Drawing the vectors orthogonal to one another
# lowers the error nearly everywhere, at no cost.
#
# ## 3. The point of it: sums that are taken once
#
# $$
# \sum_j \bigl(\phi(q_i) \cdot \phi(k_j)\bigr)\, v_j =
# \phi(q_i)^\top \underbrace{\sum_j \phi(k_j)\, v_j^\top}_{M \times D}
# $$
#
# The bracket does not depend on the query. In a decoder it grows by a term a token, and is all that has to
# be kept:

# %%
n, M = 400, 256
q, k, v = (normal(n, D) / 2 for _ in range(3))
w = normal(M, D)
phi_q, phi_k = positive(q, w), positive(k, w)
weights = (phi_q @ phi_k.T).tril()  # [n, n], the quadratic way
quadratic = weights @ v / weights.sum(1, keepdim=True)
state, norm, outputs = torch.zeros(M, D, dtype=torch.float64), torch.zeros(M, dtype=torch.float64), []
for t in range(n):  # the linear way: a state of fixed size
    state, norm = state + torch.outer(phi_k[t], v[t]), norm + phi_k[t]
    outputs.append(phi_q[t] @ state / (phi_q[t] @ norm))
print(f"both ways agree to {(torch.stack(outputs) - quadratic).abs().max():.0e}")
print(f"kept: {state.numel() + norm.numel():,} numbers")
print(f"keys and values after a million tokens: {2 * D * 10**6:,} numbers")

# %% [markdown]
# ## 4. What survives, and what does not
#
# The variance of a positive feature's estimate grows with $e^{|q + k|^2}$: it errs *most* where query and
# key agree and are long, in other words where attention is sharp. Two tasks for the same 512 keys.
# *Averages*: keys belong to four topics, and a query asks what the tokens of its topic have in common.
# *Look-ups*: a query asks for the value of one key. Is the largest entry of the answer the right one?

# %%
module = PerformerConfig(features=256).build(num_heads=1, head_size=D).eval()
n, context = 512, Context(512, 512)


def answers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What softmax attention and its estimate say, [n, Dv] each."""
    exact = (q @ k.T / math.sqrt(D)).softmax(-1) @ v
    with torch.no_grad():
        estimate = module(*(x[None, None].float() for x in (q, k, v)), context, None, None)[0][0, 0]
    return exact, estimate


print("sharpness   look-ups: softmax, kernel   topics: softmax, kernel")
for sharpness in (0.5, 1.0, 2.0, 4.0):
    shares = []
    k = math.sqrt(D) * torch.nn.functional.normalize(normal(n, D))
    for answer in answers(sharpness * k, k, torch.eye(n).double()):
        shares.append((answer.argmax(1) == torch.arange(n)).double().mean().item())
    topics = torch.arange(n) % 4
    centres = 2 * torch.nn.functional.one_hot(topics, D).double()
    k = centres + normal(n, D) / 4
    for answer in answers(sharpness * centres, k, torch.nn.functional.one_hot(topics, 4).double()):
        shares.append((answer.argmax(1) == topics).double().mean().item())
    print(f"{sharpness:9}   {shares[0]:17.0%}, {shares[1]:6.0%}   {shares[2]:15.0%}, {shares[3]:6.0%}")

# %% [markdown]
# So a kernel estimates *averages* well and *look-ups* badly. A layer that takes the mean of a topic loses
# little; a head that copies one name from far away loses it. Trained from the start with a kernel, a model
# learns to do without sharp heads; converted from softmax, it misses them. Where look-ups matter and texts
# are long, choose keys by content ([LSH](../members/mechanism/lsh.md),
# [routing](../members/mechanism/routing.md)) or keep a window of exact attention.
#
# `polyformer reproduce random-features` draws the error curves of the paper;
# [Performer](../members/mechanism/performer.md) and [RFA](../members/mechanism/rfa.md) have pages of their
# own.
