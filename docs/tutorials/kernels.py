# %% [markdown]
# # How kernels estimate attention
#
# Attention compares every query with every key: $n^2$ weights $e^{q \cdot k}$. If the weight were a product
# $\phi(q) \cdot \phi(k)$ of two vectors, one sum would serve all queries, and the cost would be linear. The
# weight is not such a product, but it is the *mean* of such products over random vectors. This page shows the
# mean, the error of an estimate from a finite number of vectors, and the effect on attention.

# %%
import math

import torch

from polyformer.attention import Context, PerformerConfig, directions

generator = torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    """Draw independent numbers from N(0, 1)."""
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
# Both factors are positive, and each depends on a single vector. An older method uses sines and cosines:
# $\operatorname{E}[\cos(w \cdot (q - k))] = e^{-|q-k|^2/2}$.


# %%
def positive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute phi(x) [.., M] from the rows of w [M, D]."""
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(w))


def trigonometric(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute phi(x) [.., 2 M]."""
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
# Four times the number of features halves the error, as for every mean.
#
# ## 2. The error of each method
#
# Attention compares weights with each other, so relative errors matter. The table shows the error of 64
# features divided by the true weight (root mean square over 2,000 draws), for vectors of length 1 at several
# angles:

# %%
DRAWS, COUNT = 2000, 64


def relative_error(phi, angle: float, orthogonal: bool = False, length: float = 1.0) -> float:
    """Compute the relative error of an estimate for two vectors of this length and angle."""
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
# Trigonometric features are exact if query and key are equal, and useless if they are opposed. There the
# weight is smallest, and its estimate is a difference of large numbers that can be negative. Most attention
# weights are small. *Positive* features (Choromanski et al. 2021) have their *smallest* error for small
# weights. Orthogonal vectors lower the error almost everywhere, without extra cost.
#
# ## 3. The benefit: one sum for all queries
#
# $$
# \sum_j \bigl(\phi(q_i) \cdot \phi(k_j)\bigr)\, v_j =
# \phi(q_i)^\top \underbrace{\sum_j \phi(k_j)\, v_j^\top}_{M \times D}
# $$
#
# The bracket does not depend on the query. In a decoder each token adds one term to it. It replaces the cache
# of keys and values:

# %%
n, M = 400, 256
q, k, v = (normal(n, D) / 2 for _ in range(3))
w = normal(M, D)
phi_q, phi_k = positive(q, w), positive(k, w)
weights = (phi_q @ phi_k.T).tril()  # [n, n], quadratic cost
quadratic = weights @ v / weights.sum(1, keepdim=True)
state, norm, outputs = torch.zeros(M, D, dtype=torch.float64), torch.zeros(M, dtype=torch.float64), []
for t in range(n):  # linear cost: a state of fixed size
    state, norm = state + torch.outer(phi_k[t], v[t]), norm + phi_k[t]
    outputs.append(phi_q[t] @ state / (phi_q[t] @ norm))
print(f"both forms agree to {(torch.stack(outputs) - quadratic).abs().max():.0e}")
print(f"state: {state.numel() + norm.numel():,} numbers")
print(f"keys and values after a million tokens: {2 * D * 10**6:,} numbers")

# %% [markdown]
# ## 4. Averages survive, look-ups do not
#
# The variance of an estimate with positive features grows with $e^{|q + k|^2}$. The error is *largest* if
# query and key agree and are long, that is, if attention is sharp. We compare two tasks with 512 keys.
# *Averages*: keys belong to four topics, and a query needs the mean over its topic. *Look-ups*: a query needs
# the value of one key. The score is the share of queries with the correct largest entry.

# %%
module = PerformerConfig(features=256).build(num_heads=1, head_size=D).eval()
n, context = 512, Context(512, 512)


def answers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention and its estimate, [n, Dv] each."""
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
# A kernel estimates *averages* well and *look-ups* badly. A layer that averages over a topic loses little. A
# head that copies one distant name fails. A model trained with a kernel from the start learns to work without
# sharp heads; a model converted from softmax loses them. If look-ups in long texts matter, choose keys by
# content ([LSH](../members/mechanism/lsh.md), [routing](../members/mechanism/routing.md)) or keep a window of
# exact attention.
#
# `polyformer reproduce random-features` draws the error curves of the paper. See also the pages of
# [Performer](../members/mechanism/performer.md) and [RFA](../members/mechanism/rfa.md).
