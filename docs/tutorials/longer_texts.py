# %% [markdown]
# # Your text is longer than your model
#
# A sentence encoder reads 256 or 512 tokens, but a chapter has thousands. This page extends an encoder to
# eight times its length and measures the benefit with one question: **which chapter is this passage from?**
#
#     pip install 'polyformer[hub]'
#     python docs/tutorials/longer_texts.py                           # a small, random encoder: seconds
#     MODEL=DIR BOOK=book.txt python docs/tutorials/longer_texts.py   # your encoder and book: minutes
#
# `MODEL` is the folder of a BERT-like encoder. `BOOK` is a text with lines such as "CHAPTER IV".

# %%
import os
import random
import re
import time
from pathlib import Path

import torch
import transformers

import polyformer.models.transformers
import polyformer.models.transformers_attention
from polyformer.data import TokenizerConfig, build_tokenizer, load_tokenizer
from polyformer.models.checkpoints import convert
from polyformer.training import contrastive_loss

MODEL, BOOK = os.environ.get("MODEL"), os.environ.get("BOOK")
STEPS, CHAPTERS = int(os.environ.get("STEPS", "4")), int(os.environ.get("CHAPTERS", "40"))
OUT = Path(os.environ.get("OUT", "long-encoder"))
torch.manual_seed(0)
random.seed(0)
start = time.perf_counter()

# %% [markdown]
# ## 1. Chapters, and a checkpoint
#
# Without a book, we generate random chapters. Like reports and contracts, they begin alike and differ later.


# %%
def chapters_of(book: str | None) -> list[str]:
    """Return the chapters of a book, or random chapters."""
    if book is not None:
        text = Path(book).read_text(encoding="utf-8-sig")
        pieces = re.split(r"^CHAPTER [IVXLC\d]+\.?\s*$", text, flags=re.MULTILINE)[1:]
        return [piece for piece in pieces if len(piece.split()) > 600]
    words = ["".join(random.choices("abcdefghiklmnoprstu", k=random.randint(2, 5))) for _ in range(300)]
    chapters = []
    for _ in range(CHAPTERS + 16):
        own = random.sample(words, 12)
        body = [random.choice(own if random.random() < 0.4 else words) for _ in range(330)]
        chapters.append(" ".join([*words[:70], *body]))
    return chapters


def small_checkpoint(texts: list[str], folder: Path) -> Path:
    """Save a random BERT with two layers and 64 positions in the format of transformers."""
    config = transformers.BertConfig(
        vocab_size=600,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=600), texts).save(folder)
    return folder


chapters = chapters_of(BOOK)
folder = Path(MODEL) if MODEL else small_checkpoint(chapters, OUT / "short")
tokenizer = load_tokenizer(folder)
pooling = "embed" if (folder / "modules.json").is_file() else {"kind": "embed", "pooling": "mean"}
model = polyformer.from_pretrained(folder, head=pooling)
SHORT = min(model.config.max_position_embeddings, 256)  # sentence encoders are trained on short texts
LONG = 8 * model.config.max_position_embeddings
print(f"{len(chapters)} chapters; the encoder reads {SHORT} tokens, the target is {LONG}")

# %% [markdown]
# We cut a passage out of each chapter. The encoder maps passages and chapters to vectors, and the cosine
# ranks the chapters for each passage. The score is the mean of 1 / rank. It is 1 if every passage ranks its
# chapter first.


# %%
def without_a_passage(text: str, words: int = 40) -> tuple[str, str]:
    """Split a chapter into a passage and the rest."""
    parts = text.split()
    at = random.randrange(len(parts) // 4, len(parts) - words)
    return " ".join(parts[at : at + words]), " ".join(parts[:at] + parts[at + words :])


def ids_of(text: str, limit: int) -> list[int]:
    """Encode a text with the special tokens of the model, cut to `limit` tokens."""
    ids = tokenizer.encode_for_model(text)[0]
    return ids if len(ids) <= limit else [*ids[: limit - 1], ids[-1]]


def vectors(model, texts: list[str], limit: int) -> torch.Tensor:
    """Encode texts as vectors [texts, width]."""
    return torch.cat([model(torch.tensor([ids_of(text, limit)])).logits for text in texts])


@torch.no_grad()
def score(passages: torch.Tensor, documents: torch.Tensor) -> float:
    """Compute the mean of 1 / rank of the correct chapter."""
    cosines = torch.nn.functional.normalize(passages) @ torch.nn.functional.normalize(documents).T
    ranks = (cosines >= cosines.diagonal()[:, None]).sum(1)
    return float((1 / ranks).mean())


held_out = [without_a_passage(text) for text in chapters[:CHAPTERS]]
passages, documents = [pair[0] for pair in held_out], [pair[1] for pair in held_out]
to_train_on = chapters[CHAPTERS:]


def report(name: str, model, limit: int) -> None:
    """Print the score of a model that reads up to `limit` tokens of a chapter."""
    begin = time.perf_counter()
    with torch.no_grad():
        value = score(vectors(model, passages, SHORT), vectors(model, documents, limit))
    print(f"{name}: {value:.3f} ({time.perf_counter() - begin:.1f} s)", flush=True)


# %% [markdown]
# ## 2. The cost of cutting
#
# The usual method is to cut the text. The difference between two chapters may come after the cut.

# %%
lengths = [len(tokenizer.encode(text)) for text in documents]
mean = sum(lengths) / len(lengths)
print(f"a chapter has {mean:.0f} tokens; the encoder reads {SHORT / mean:.0%} of them")
report("cut", model, SHORT)

# %% [markdown]
# Try the simplest method before a conversion: the mean over the vectors of short pieces.


# %%
@torch.no_grad()
def over_pieces(text: str) -> torch.Tensor:
    """Average the vectors of the pieces of a text, [1, width]."""
    ids = tokenizer.encode(text)
    texts = [tokenizer.decode(ids[i : i + SHORT - 2]) for i in range(0, len(ids), SHORT - 2)]
    return vectors(model, texts, SHORT).mean(0, keepdim=True)


with torch.no_grad():
    pieces = score(vectors(model, passages, SHORT), torch.cat([over_pieces(text) for text in documents]))
print(f"pieces: {pieces:.3f}")

# %% [markdown]
# ## 3. Convert
#
# The conversion repeats the learned positions from their start. Attention gets a window and one global token,
# so time and memory grow linearly with the text. All weights are copied. Texts within the window keep their
# vectors.

# %%
WINDOW = SHORT // 2
long, summary = convert(model, f"Window({WINDOW}) | Global(1)", max_positions=LONG)
print(summary)
short_text = " ".join(passages[0].split()[: WINDOW // 4])
with torch.no_grad():
    difference = (vectors(long, [short_text], WINDOW) - vectors(model, [short_text], WINDOW)).abs().max()
print(f"a short text's vector moves by: {float(difference):.1e}")
report("converted", long, LONG)

# %% [markdown]
# ## 4. Train further
#
# We train a few steps on other chapters. The loss pulls the vector of a passage to its chapter and away from
# the other chapters of the batch. Real training takes thousands of steps; these show that it runs, and its
# cost.

# %%
long.train()
optimizer = torch.optim.AdamW(long.parameters(), lr=2e-5 if MODEL else 1e-3)
for step in range(STEPS):
    pairs = [without_a_passage(text) for text in random.sample(to_train_on, min(4, len(to_train_on)))]
    near, far = (vectors(long, [pair[side] for pair in pairs], LONG) for side in (0, 1))
    loss = contrastive_loss(near, far, temperature=0.05, symmetric=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
long.eval()
report("trained", long, LONG)

# %% [markdown]
# ## 5. Save it and use it in transformers
#
# `wrap` turns it into a transformers model. `AutoModel`, `Trainer` and pipelines load the folder.

# %%
polyformer.models.transformers.wrap(long).save_pretrained(OUT / "long")
tokenizer.save(OUT / "long")
theirs = transformers.AutoModel.from_pretrained(OUT / "long").eval()
with torch.no_grad():
    hidden = theirs(torch.tensor([ids_of(documents[0], LONG)])).last_hidden_state
print(f"AutoModel reads {hidden.shape[1]} tokens at once")

# %% [markdown]
# You can also attach the window to a transformers model without conversion. The model reads the same number
# of tokens as before, but long texts cost less. A model with rotary positions also reads longer texts.

# %%
plain = transformers.AutoModel.from_pretrained(folder).eval()
polyformer.attach(plain, f"Window({WINDOW}) | Global(1)")
print(polyformer.explain(plain))
with torch.no_grad():
    print(f"attached: {tuple(plain(torch.tensor([ids_of(documents[0], SHORT)])).last_hidden_state.shape)}")

# %% [markdown]
# The same on the command line, with a folder that sentence-transformers loads:
#
#     polyformer convert MODEL long --head embed --max-positions 4096 --attention "Window(128) | Global(1)" \
#         --format wrapped
#
# `--evaluate TEXT` measures before and after the conversion. See [docs/long_texts.md](../long_texts.md).

# %%
print(f"done in {(time.perf_counter() - start) / 60:.1f} minutes")
