# %% [markdown]
# # The Transformer, from its equation to a trained translator
#
# The Transformer of 2017 on one page: the equation, the purpose of its parts, and a model that learns to
# translate in seconds. The language is small: the numbers below a thousand in English and German. But it has
# a real difficulty: German says *einundzwanzig*, one and twenty. A word-by-word translation from left to
# right is wrong.

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
# Every token has a query $q$, a key $k$ and a value $v$:
#
# $$
# y_i = \sum_j \frac{e^{q_i \cdot k_j / \sqrt{D}}}{\sum_r e^{q_i \cdot k_r / \sqrt{D}}}\; v_j
# $$
#
# The weights sum to 1, so $y_i$ is an average of values. Queries and keys determine the weights.


# %%
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute y [.., Tq, Dv] from q [.., Tq, D], k [.., Tk, D] and v [.., Tk, Dv]."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


q, k, v = (torch.randn(2, 4, 50, 16, dtype=torch.float64) for _ in range(3))  # [batch, heads, tokens, width]
difference = (attention(q, k, v) - attend(q, k, v)).abs().max()
print(f"the equation and attend differ by {difference:.0e}")

# %% [markdown]
# Why divide by $\sqrt{D}$? A sum of $D$ products with variance 1 has variance $D$. Without the division, the
# softmax of such scores is close to one-hot, and its gradient vanishes:

# %%
for width in (16, 256):
    q, k = torch.randn(1000, width), torch.randn(50, width)
    raw, scaled = ((q @ k.T / scale).softmax(-1).amax(-1).mean() for scale in (1.0, math.sqrt(width)))
    print(f"width {width:3}: the mean of the largest of 50 weights is {raw:.2f}, after division {scaled:.2f}")

# %% [markdown]
# ## 2. The position of a token
#
# The equation ignores order: a permutation of the keys with their values does not change $y$. Therefore a
# positional encoding is added to each token: sines and cosines of many wavelengths. With them, a shift by $k$
# tokens is the same linear map at every position, so a head can learn to look "three tokens back":

# %%
positions, pairs = torch.arange(100.0, dtype=torch.float64), torch.arange(32, dtype=torch.float64)
angles = positions[:, None] / 10000 ** (pairs / 32)
table = torch.cat([angles.sin(), angles.cos()], dim=1)  # [100, 64]
turn = 3 / 10000 ** (pairs / 32)  # the angle of a shift by three, the same at every position
turned = torch.cat(
    [
        angles.sin() * turn.cos() + angles.cos() * turn.sin(),
        angles.cos() * turn.cos() - angles.sin() * turn.sin(),
    ],
    dim=1,
)
print(f"one rotation shifts every position by three; error {(turned[:97] - table[3:]).abs().max():.0e}")

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
    """Spell a number, 321: three hundred twenty one."""
    if n >= 100:
        return [ONES[n // 100], "hundred", *(english(n % 100) if n % 100 else [])]
    return [ONES[n]] if n < 20 else [TENS[n // 10], *([ONES[n % 10]] if n % 10 else [])]


def german(n: int) -> list[str]:
    """Spell a number, 321: drei hundert ein und zwanzig."""
    if n >= 100:
        return [EINS[n // 100], "hundert", *(german(n % 100) if n % 100 else [])]
    return [EINS[n]] if n < 20 else [*([EINS[n % 10], "und"] if n % 10 else []), ZEHN[n // 10]]


words = ["<pad>", "<start>", "<end>", *sorted({w for n in range(1000) for w in english(n) + german(n)})]
number_of = {word: index for index, word in enumerate(words)}
numbers = random.sample(range(1000), 1000)
train, held_out = numbers[:800], numbers[800:]
print(f"{len(words)} words, {len(train)} training pairs, {len(held_out)} held-out pairs")
print(" ".join(english(321)), "->", " ".join(german(321)))


def rows(texts: list[list[str]]) -> Tensor:
    """Encode texts with the end token, padded to one length: [texts, tokens]."""
    ids = [torch.tensor([number_of[word] for word in [*text, "<end>"]]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)


# %% [markdown]
# ## 4. A model
#
# An encoder reads the source. A decoder writes the target, and every decoder layer attends to the output of
# the encoder. The preset has the sizes of a paper. Set any size by name, for encoder and decoder together.

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
# We use Adam with the betas of the paper and a warm-up, because large first steps would be harmful. Padding
# has no effect: `attention_mask` marks the non-padding tokens, and labels of -100 are ignored.

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
# The loss does not fall to 0. *Label smoothing* spreads a tenth of the target probability over all other
# words, so that the model does not become overconfident.
#
# ## 6. Translating new numbers


# %%
def translate(texts: list[list[str]]) -> list[list[str]]:
    """Translate a batch of texts greedily."""
    source = rows(texts)
    ids = model.generate(source, attention_mask=source != 0, max_new_tokens=10).sequences
    return [[words[i] for i in row if i > 2] for row in ids.tolist()]


model.eval()
translated = translate([english(n) for n in held_out])
right = sum(text == german(n) for text, n in zip(translated, held_out))
print(f"right: {right} of {len(held_out)} held-out numbers")
for n in held_out[:4]:
    print(f"{n}: {' '.join(english(n))} -> {' '.join(translate([english(n)])[0])}")

# %% [markdown]
# ## 7. The attention of a translation
#
# A translation from left to right would attend to the words in order. The cross-attention of the last layer
# shows the words that the decoder reads as it writes each word. For the ones it looks beyond the tens, and
# then back.

# %%
n = next(n for n in held_out if n > 100 and n % 100 > 20 and n % 10 > 1)
source, target = rows([english(n)]), rows([german(n)])
out = model(source, labels=target, output_attentions=True)
weights = out.cross_attentions[-1][0].mean(0)  # [target, source], the mean of its heads
print(" " * 10 + "".join(f"{word:>9}" for word in [*english(n), "<end>"]))
for word, row in zip([*german(n), "<end>"], weights):
    print(f"{word:>9} " + "".join(f"{value:9.2f}" for value in row))
looked = weights[2, :].argmax().item()
print(f"writing '{german(n)[2]}' it looks most at '{[*english(n), '<end>'][looked]}'")

# %% [markdown]
# ## Next steps
#
# `polyformer train multi30k --data DIR` trains the same model on real sentences (35 BLEU in half an hour on
# two cores, [results](../results/training.md)), and `polyformer translate RUN "..."` uses it. The [list
# of members](../members.md) shows all alternatives to this attention. [The next tutorial](own_attention.py)
# shows how to invent a new one.
