# %% [markdown]
# # Memories
#
# A model reads a text in segments, because a graph of the whole text would not fit. What does it still know
# of the segments before? That depends on its *memory*, an axis of its own here. This page makes a text in
# which the past can be measured, trains the same small decoder with several memories, and asks each what it
# knows.

# %%
import dataclasses

import torch

import polyformer

torch.manual_seed(0)

# %% [markdown]
# ## 1. A text that refers back
#
# Random tokens that come again 24 tokens later, over and over. Segments have 8 tokens, so what a token
# repeats always lies in earlier segments: 23 tokens before the one that predicts it. The share of tokens
# that a model predicts is the share of that past that it still has.

# %%
PERIOD, SEGMENT, VOCABULARY, LENGTH = 24, 8, 32, 96


def texts(batch: int) -> torch.Tensor:
    """[batch, LENGTH]"""
    return torch.randint(VOCABULARY, (batch, PERIOD)).repeat(1, LENGTH // PERIOD)


def decoder(memory: str) -> torch.nn.Module:
    """One layer with positions that are distances: a text that is read on and on has no first token."""
    torch.manual_seed(1)
    return polyformer.create_model(
        "decoder-small",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        dropout=0.0,
        position="shaw(clip=32)",
        memory=memory,
    )


# %% [markdown]
# ## 2. Reading in segments
#
# `model(ids, state=state)` takes the state of the segment before and puts out the next one. No gradient
# goes back through it, so that a step costs what a segment costs.


# %%
def segments(ids: torch.Tensor):
    """(tokens, the tokens that follow them) of one segment after the other."""
    for start in range(0, LENGTH - SEGMENT, SEGMENT):
        yield ids[:, start : start + SEGMENT], ids[:, start + 1 : start + SEGMENT + 1]


def train(model: torch.nn.Module, rows: int = 30) -> torch.nn.Module:
    """Read `rows` batches of texts, with a step after each segment."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(rows):
        state = model.new_state()
        for ids, following in segments(texts(16)):
            out = model(ids, state=state)
            state = out.state
            loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), following.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def known(model: torch.nn.Module) -> float:
    """The share of the tokens after the first period that it predicts."""
    state, right, seen = model.new_state(), [], 0
    for ids, following in segments(texts(32)):
        out = model(ids, state=state)
        state, seen = out.state, seen + SEGMENT
        if seen > PERIOD + SEGMENT:
            right.append((out.logits.argmax(-1) == following).float().mean())
    return torch.stack(right).mean().item()


# %% [markdown]
# ## 3. How long a memory
#
# Transformer-XL's memory keeps the inputs of each layer for the last tokens. With a single layer its length
# is its reach. One training, with a memory of 24; the length is free afterwards:

# %%
recurrent = train(decoder("recurrent(length=24)"))
for length in (0, 8, 16, 24, 48):
    recurrent.decoder.memory.length = length
    print(f"a memory of {length:2} tokens: {known(recurrent):4.0%} known")

# %% [markdown]
# A memory of 24 knows everything, one of 8 nothing, and one of 16 knows a little, for a reason that can be
# counted: the last query of a segment sees 7 tokens of its own segment and 16 of the memory, 23 in all; the
# seven queries before it see fewer. One in eight is 12.5 %, and guesses, right once in 32, add 2.7. A
# longer memory than in training does no harm here.
#
# ## 4. The gist is not the words
#
# The Compressive Transformer does not drop what leaves its memory, but makes one vector of every two. Eight
# tokens as they were and eight such vectors reach back as far as 24 tokens. It has the past, but has it
# lost the words?

# %%
compressive = train(decoder("compressive(length=8, compressed_length=8, rate=2)"))
print(f"eight tokens and eight pairs: {known(compressive):.0%} known")

# %% [markdown]
# A mixture of two random tokens does not say which stood first. (Trained for hours on books, where the gist
# is worth having, compressed memories lower perplexity; [measured](../results.md#memories).) Where exact
# words matter, they have to be kept and looked up: that is the memory of the [Memorizing
# Transformer](../members/memory/memorizing.md), which finds old keys by content.
#
# ## 5. What it costs
#
# The numbers that a state holds after so many tokens, in a decoder of four layers. Without a memory it is a
# cache of all keys and values, and grows for ever; the others stay as they are once they are full. (Caches
# keep room for tokens to come, which counts here.)


# %%
def numbers(value) -> int:
    """Of floating point in a state, however it is built."""
    if isinstance(value, torch.Tensor):
        return value.numel() if value.is_floating_point() else 0
    if dataclasses.is_dataclass(value):
        return sum(numbers(getattr(value, field.name)) for field in dataclasses.fields(value))
    return sum(map(numbers, value)) if isinstance(value, tuple | list) else 0


names = ["none", "recurrent(length=64)", "compressive(length=32, compressed_length=32)"]
names.append("memorizing(length=32, store=256)")
print(f"{'memory':46}" + "".join(f"{n:>10} tokens" for n in (256, 512, 1024)))
for name in names:
    model = polyformer.create_model("decoder-small", num_hidden_layers=4, position="rope", memory=name).eval()
    state, sizes = model.new_state(), {}
    with torch.no_grad():
        for read in range(64, 1025, 64):
            state = model(torch.randint(1000, (1, 64)), state=state).state
            sizes[read] = numbers(state)
    print(f"{name:46}" + "".join(f"{sizes[n]:17,}" for n in (256, 512, 1024)))

# %% [markdown]
# ## Where to go on
#
# `polyformer train transformer-xl` and `memorizing` train on text with `feed: in_order`, which keeps each
# row of a batch on its text ([runs](../runs.md#a-memory)). A model that had none gets a memory by
# `polyformer convert MODEL out --memory memorizing`. A memory outside of the model, that needs no training
# at all, is a [datastore](../datastores.md).
