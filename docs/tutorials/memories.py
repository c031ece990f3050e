# %% [markdown]
# # Memories
#
# A model reads a long text in segments, because the graph of the whole text does not fit in memory. Its
# *memory*, one axis of a model, decides how much it knows about earlier segments. This page generates texts
# that measure this knowledge, and trains the same small decoder with several memories.

# %%
import dataclasses

import torch

import polyformer

torch.manual_seed(0)

# %% [markdown]
# ## 1. A text that refers back
#
# The texts repeat 24 random tokens. Segments have 8 tokens, so the first occurrence of a token is in an
# earlier segment: 23 tokens before the query that predicts it. The share of correct predictions is the share
# of the past that the model knows.

# %%
PERIOD, SEGMENT, VOCABULARY, LENGTH = 24, 8, 32, 96


def texts(batch: int) -> torch.Tensor:
    """Generate random texts [batch, LENGTH]."""
    return torch.randint(VOCABULARY, (batch, PERIOD)).repeat(1, LENGTH // PERIOD)


def decoder(memory: str) -> torch.nn.Module:
    """Create one layer with relative positions, because an endless text has no first token."""
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
# `model(ids, state=state)` reads the state of the previous segment and returns the next state. No gradient
# flows through the state, so the cost of a step is the cost of a segment.


# %%
def segments(ids: torch.Tensor):
    """Yield the tokens of each segment and their next tokens."""
    for start in range(0, LENGTH - SEGMENT, SEGMENT):
        yield ids[:, start : start + SEGMENT], ids[:, start + 1 : start + SEGMENT + 1]


def train(model: torch.nn.Module, rows: int = 30) -> torch.nn.Module:
    """Train on `rows` batches of texts, with an optimizer step after each segment."""
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
    """Return the share of correct predictions after the first period."""
    state, right, seen = model.new_state(), [], 0
    for ids, following in segments(texts(32)):
        out = model(ids, state=state)
        state, seen = out.state, seen + SEGMENT
        if seen > PERIOD + SEGMENT:
            right.append((out.logits.argmax(-1) == following).float().mean())
    return torch.stack(right).mean().item()


# %% [markdown]
# ## 3. The length of a memory
#
# The memory of Transformer-XL keeps the inputs of each layer for the last tokens. In a single layer the reach
# is its length. We train once with a memory of 24, and then change the length:

# %%
recurrent = train(decoder("recurrent(length=24)"))
for length in (0, 8, 16, 24, 48):
    recurrent.decoder.memory.length = length
    print(f"a memory of {length:2} tokens: {known(recurrent):4.0%} known")

# %% [markdown]
# A memory of 24 knows everything, and a memory of 8 knows nothing. A memory of 16 knows a little: the last
# query of a segment sees 7 tokens of its segment and 16 of the memory, 23 in total; the seven earlier queries
# see fewer. One in eight is 12.5 %. Random guesses are correct once in 32 and add 2.7 %. A longer memory than
# in training does no harm here.
#
# ## 4. Compressed memories lose exact tokens
#
# The Compressive Transformer compresses old memories: it merges two vectors into one. Eight tokens and eight
# merged vectors reach back 24 tokens. Does the model still know the exact tokens?

# %%
compressive = train(decoder("compressive(length=8, compressed_length=8, rate=2)"))
print(f"eight tokens and eight pairs: {known(compressive):.0%} known")

# %% [markdown]
# A mixture of two random tokens does not show their order. (Trained for hours on books, compressed memories
# lower perplexity; see the [results](../results/memories.md).) If exact words matter, use the memory of the
# [Memorizing Transformer](../members/memory/memorizing.md). It stores all keys and finds them by content.
#
# ## 5. The cost
#
# The table counts the numbers in the state of a four-layer decoder. Without a memory the state is a KV cache,
# which grows with the text. Memories stop growing when they are full. (The count includes the spare capacity
# of a cache.)


# %%
def numbers(value) -> int:
    """Count the floating-point numbers in a nested state."""
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
# ## Next steps
#
# `polyformer train transformer-xl` and `polyformer train memorizing` train on text with `feed: in_order`:
# each row of a batch continues one text ([runs](../runs.md#a-memory)).
# `polyformer convert MODEL out --memory memorizing` adds a memory to a trained model. A
# [datastore](../datastores.md) is a memory outside the model that needs no training.
