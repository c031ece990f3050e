"""Text embeddings and semantic search.

    python examples/embeddings.py                            # trains a tiny encoder in seconds
    python examples/embeddings.py MINILM-DIR "how do I open a file?"   # a sentence encoder from the hub

The texts are the paragraphs of Python's language reference, which comes with Python.
"""

import random
import sys

import torch

import polyformer
from polyformer.data import TokenizerConfig, build_tokenizer, default_documents, load_tokenizer
from polyformer.training import contrastive_loss

LONGEST = 64  # texts are cut to this number of tokens


def embed(model, tokenizer, texts: list[str]) -> torch.Tensor:
    """Return normalized embeddings [texts, E]. The attention mask excludes padding."""
    rows = [tokenizer.encode_for_model(text)[0][:LONGEST] for text in texts]
    ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    return torch.nn.functional.normalize(model(ids, attention_mask=mask).logits)


def tiny_encoder(texts: list[str], steps: int = 60):
    """Train an encoder to match the two halves of each paragraph in a batch of 32."""
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="wordpiece", vocab_size=2000), texts)
    model = polyformer.create_model("encoder-tiny", vocab_size=len(tokenizer), head="embed")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        words = [text.split() for text in random.sample(texts, 32)]
        left, right = ([" ".join(half) for half in side] for side in zip(*map(halves, words)))
        loss = contrastive_loss(
            embed(model, tokenizer, left), embed(model, tokenizer, right), temperature=0.05, symmetric=True
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss:.2f}")
    return model.eval(), tokenizer


def halves(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words at even and at odd positions."""
    return words[::2], words[1::2]


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    paragraphs = [" ".join(part.split()) for text in default_documents() for part in text.split("\n\n")]
    paragraphs = [text for text in paragraphs if len(text.split()) > 20]
    if len(sys.argv) > 1:
        folder = sys.argv[1]
        model, tokenizer = polyformer.from_pretrained(folder, head="embed").eval(), load_tokenizer(folder)
    else:
        model, tokenizer = tiny_encoder(paragraphs)
    question = sys.argv[2] if len(sys.argv) > 2 else "what does the else clause of a loop do?"
    some = paragraphs[:: max(1, len(paragraphs) // 400)]
    with torch.no_grad():
        vectors = torch.cat([embed(model, tokenizer, some[i : i + 50]) for i in range(0, len(some), 50)])
        similarity = vectors @ embed(model, tokenizer, [question])[0]
    print(question)
    for index in similarity.topk(3).indices.tolist():
        print(f"{similarity[index]:.2f}  {some[index][:90]}")
