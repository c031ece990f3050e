# %% [markdown]
# # The Transformer, from its equation to a trained translator
#
# Everything of 2017 on one page: the equation, what its parts are for, and a model that learns to translate
# in seconds. The language is small, the numbers below a thousand in English and in German, but its
# difficulty is a real one: German says *einundzwanzig*, one and twenty. A translator that goes from left to
# right word by word cannot be right.

# %%
import math
import random
import time

import torch
from torch import Tensor

import polyformer
from polyformer import attend

torch.manual_seed(0)
random.seed(0)

# %% [markdown]
# ## 1. The equation
#
# Every token asks with a query $q$, every token answers to a key $k$ and has a value $v$ to give:
#
# $$
# y_i = \sum_j \frac{e^{q_i \cdot k_j / \sqrt{D}}}{\sum_r e^{q_i \cdot k_r / \sqrt{D}}}\; v_j
# $$
#
# The sum of weights is 1, so that $y_i$ is an average of values, and which average is up to the queries and
# keys.


# %%
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [.., Tq, D], k [.., Tk, D], v [.., Tk, Dv] -> [.., Tq, Dv]"""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


q, k, v = (torch.randn(2, 4, 50, 16, dtype=torch.float64) for _ in range(3))  # [batch, heads, tokens, width]
difference = (attention(q, k, v) - attend(q, k, v)).abs().max()
print(f"the equation and attend differ by {difference:.0e}")

# %% [markdown]
# Why divide by $\sqrt{D}$? A product of $D$ terms of variance 1 has variance $D$. Without the division a
# softmax over such scores is nearly all or nothing, and its gradient vanishes:

# %%
for width in (16, 256):
    q, k = torch.randn(1000, width), torch.randn(50, width)
    raw, scaled = ((q @ k.T / scale).softmax(-1).amax(-1).mean() for scale in (1.0, math.sqrt(width)))
    print(f"width {width:3}: the largest of 50 weights is {raw:.2f} in the mean, {scaled:.2f} once divided")

# %% [markdown]
# ## 2. Where a token stands
#
# The equation does not know order: shuffle the keys with their values and $y$ stays. So a vector of the
# position is added to each token, sines and cosines of many wavelengths. Their use is that a step of $k$
# tokens is one and the same linear map everywhere, so that a head can learn to look "three back":

# %%
positions, pairs = torch.arange(100.0, dtype=torch.float64), torch.arange(32, dtype=torch.float64)
angles = positions[:, None] / 10000 ** (pairs / 32)
table = torch.cat([angles.sin(), angles.cos()], dim=1)  # [100, 64]
turn = 3 / 10000 ** (pairs / 32)  # what three places turn each pair by, wherever they are
turned = torch.cat(
    [
        angles.sin() * turn.cos() + angles.cos() * turn.sin(),
        angles.cos() * turn.cos() - angles.sin() * turn.sin(),
    ],
    dim=1,
)
print(f"one rotation takes every position three on, up to {(turned[:97] - table[3:]).abs().max():.0e}")

# %% [markdown]
# ## 3. A language

# %%
split = str.split
ONES = split("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen")
ONES += split("sixteen seventeen eighteen nineteen")
TENS = split("- ten twenty thirty forty fifty sixty seventy eighty ninety")
EINS = split("null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn")
EINS += split("sechzehn siebzehn achtzehn neunzehn")
ZEHN = split("- zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


def english(n: int) -> list[str]:
    """321: three hundred twenty one"""
    if n >= 100:
        return [ONES[n // 100], "hundred", *(english(n % 100) if n % 100 else [])]
    return [ONES[n]] if n < 20 else [TENS[n // 10], *([ONES[n % 10]] if n % 10 else [])]


def german(n: int) -> list[str]:
    """321: drei hundert ein und zwanzig"""
    if n >= 100:
        return [EINS[n // 100], "hundert", *(german(n % 100) if n % 100 else [])]
    return [EINS[n]] if n < 20 else [*([EINS[n % 10], "und"] if n % 10 else []), ZEHN[n // 10]]


words = ["<pad>", "<start>", "<end>", *sorted({w for n in range(1000) for w in english(n) + german(n)})]
number_of = {word: index for index, word in enumerate(words)}
numbers = random.sample(range(1000), 1000)
train, held_out = numbers[:800], numbers[800:]
print(f"{len(words)} words, {len(train)} pairs to learn from, {len(held_out)} that are never shown")
print(" ".join(english(321)), "->", " ".join(german(321)))


def rows(texts: list[list[str]]) -> Tensor:
    """Texts with their end mark as numbers, filled up to one length: [texts, tokens]."""
    ids = [torch.tensor([number_of[word] for word in [*text, "<end>"]]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)


# %% [markdown]
# ## 4. A model
#
# An encoder reads the source, a decoder writes the target, and in each of its layers attends to what the
# encoder made. The preset has the sizes of a paper; any of them is set by name, on both sides at once.

# %%
model = polyformer.create_model(
    "transformer-small",
    vocab_size=len(words),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    max_position_embeddings=32,
    **{"special.pad": 0, "special.bos": 1, "special.eos": 2},
)
print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")

# %% [markdown]
# ## 5. Training
#
# Adam with the betas of the paper, and a warm-up: steps are short at first, while nothing is right yet.
# Padding takes no part: `attention_mask` says which tokens are real, and labels of -100 are not counted.

# %%
STEPS, PEAK = 240, 3e-3
optimizer = torch.optim.Adam(model.parameters(), lr=PEAK, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / 40, (STEPS - step) / (STEPS - 40))
)
start = time.perf_counter()
for step in range(1, STEPS + 1):
    batch = random.sample(train, 64)
    source, target = rows([english(n) for n in batch]), rows([german(n) for n in batch])
    loss = model(source, attention_mask=source != 0, labels=target.masked_fill(target == 0, -100)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 60 == 0:
        print(f"step {step}: loss {loss.item():.2f}")
print("trained in a few seconds" if time.perf_counter() - start < 60 else "trained")

# %% [markdown]
# The loss does not fall to 0, and should not: *label smoothing* asks for a tenth of the probability to be
# spread over all other words, so that the model is not surer than it can be.
#
# ## 6. Translating what it has never seen


# %%
def translate(texts: list[list[str]]) -> list[list[str]]:
    """Greedily, all at once."""
    source = rows(texts)
    ids = model.generate(source, attention_mask=source != 0, max_new_tokens=10).sequences
    return [[words[i] for i in row if i > 2] for row in ids.tolist()]


model.eval()
translated = translate([english(n) for n in held_out])
right = sum(text == german(n) for text, n in zip(translated, held_out))
print(f"right: {right} of {len(held_out)} numbers that it was never shown")
for n in held_out[:4]:
    print(f"{n}: {' '.join(english(n))} -> {' '.join(translate([english(n)])[0])}")

# %% [markdown]
# ## 7. Where it looked
#
# A translation from left to right would look at the words in order. Recorded, the cross-attention of the
# last layer shows what the decoder read as it wrote each word: for the ones it reaches beyond the tens, and
# comes back.

# %%
n = next(n for n in held_out if n > 100 and n % 100 > 20 and n % 10 > 1)
source, target = rows([english(n)]), rows([german(n)])
out = model(source, labels=target, output_attentions=True)
weights = out.cross_attentions[-1][0].mean(0)  # [target, source], the mean of its heads
print(" " * 10 + "".join(f"{word:>9}" for word in [*english(n), "<end>"]))
for word, row in zip([*german(n), "<end>"], weights):
    print(f"{word:>9} " + "".join(f"{value:9.2f}" for value in row))
written = len(german(n))
looked = weights[2, :].argmax().item()
print(f"writing '{german(n)[2]}' it looks most at '{[*english(n), '<end>'][looked]}'")

# %% [markdown]
# ## Where to go on
#
# The same model on real sentences is `polyformer train multi30k --data DIR` (35 BLEU in half an hour on two
# cores, [results](../results.md#trained-models)), and `polyformer translate RUN "..."` uses it. What can be
# put in the place of this attention is on [the page of members](../members.md), and how to invent another
# in [the next tutorial](own_attention.py).
