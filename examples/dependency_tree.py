"""Positions from a dependency tree: an encoder labels words with and without the edges of their tree.

    python examples/dependency_tree.py                      # random trees: seconds
    python examples/dependency_tree.py FILE.conllu          # a treebank of Universal Dependencies: minutes

Each pair of words has a label: the distance between them, up to 4 on either side, or for an edge of the tree
"head" or "child" (Wang et al. 2019, Self-attention with structural position representations). The task is the
relation of each word to its head (nsubj, obj, ...); of a random tree, the word that is the head.
"""

import random
import sys
from pathlib import Path

import torch

import polyformer

REACH = 4  # words; farther words on a side have one label
HEAD, CHILD = 2 * REACH + 1, 2 * REACH + 2

Sentence = list[tuple[str, int, str]]
"""Of each word: the word, the index of its head (-1 for the root), and its label."""


def read_trees(file: Path) -> list[Sentence]:
    """Return the sentences of a CoNLL-U file; fields 1, 2, 7 and 8 are number, word, head and relation."""
    sentences = []
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        rows = [line.split("\t") for line in block.split("\n") if not line.startswith("#")]
        words = [row for row in rows if row[0].isdigit()]
        sentences.append([(row[1].lower(), int(row[6]) - 1, row[7]) for row in words])
    return sentences


def random_trees(count: int) -> list[Sentence]:
    """Return sentences of 12 random words; the head of a word may stand anywhere, and is its label."""
    sentences = []
    for _ in range(count):
        words = random.choices("abcdefgh", k=12)
        heads = [random.choice([j for j in range(12) if j != i]) for i in range(12)]
        sentences.append([(word, head, words[head]) for word, head in zip(words, heads)])
    return sentences


def relations(sentence: Sentence, tree: bool) -> torch.Tensor:
    """Return the label [T, T] of each pair: what word j is to word i."""
    place = torch.arange(len(sentence))
    labels = (place - place[:, None]).clamp(-REACH, REACH) + REACH
    for i, (_, head, _) in enumerate(sentence):
        if tree and head >= 0:
            labels[i, head], labels[head, i] = HEAD, CHILD
    return labels


def batches(sentences: list[Sentence], words: dict[str, int], names: dict[str, int], tree: bool):
    """Yield batches of 16 padded sentences as arguments of the model."""
    for start in range(0, len(sentences), 16):
        chosen = sentences[start : start + 16]
        length = max(map(len, chosen))
        batch = {
            "input_ids": torch.zeros(len(chosen), length, dtype=torch.long),
            "attention_mask": torch.zeros(len(chosen), length, dtype=torch.long),
            "labels": torch.full((len(chosen), length), -100),
            "relation_ids": torch.full((len(chosen), length, length), -1),
        }
        for row, sentence in enumerate(chosen):
            size = len(sentence)
            batch["input_ids"][row, :size] = torch.tensor([words.get(word, 1) for word, _, _ in sentence])
            batch["attention_mask"][row, :size] = 1
            batch["labels"][row, :size] = torch.tensor([names.get(name, -100) for _, _, name in sentence])
            batch["relation_ids"][row, :size, :size] = relations(sentence, tree)
        yield batch


def accuracy(train: list[Sentence], test: list[Sentence], tree: bool, epochs: int) -> float:
    """Train an encoder and return the share of words of `test` with the right label."""
    torch.manual_seed(0)
    counts: dict[str, int] = {}
    for word, _, _ in (row for sentence in train for row in sentence):
        counts[word] = counts.get(word, 0) + 1
    frequent = [word for word, count in counts.items() if count > 1]
    words = {word: number for number, word in enumerate(frequent, 2)}  # 0 is padding, 1 any other word
    labels = sorted({name for sentence in train for _, _, name in sentence})
    names = {name: number for number, name in enumerate(labels)}
    model = polyformer.create_model(
        "encoder-tiny",
        vocab_size=len(words) + 2,
        position=f"relation_labels(num_labels={CHILD + 1})",
        head=f"tag(num_labels={len(names)})",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in batches(random.sample(train, len(train)), words, names, tree):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in batches(test, words, names, tree):
            known = batch["labels"] >= 0
            right += int((model(**batch).logits.argmax(-1) == batch["labels"])[known].sum())
            total += int(known.sum())
    return right / total


if __name__ == "__main__":
    random.seed(0)
    file = sys.argv[1] if len(sys.argv) > 1 else None
    trees = read_trees(Path(file)) if file else random_trees(600)
    train, test = trees[len(trees) // 10 :], trees[: len(trees) // 10]
    print(f"{len(train)} sentences to train on, {len(test)} to test on")
    for tree, name in ((False, "distances"), (True, "distances and the tree")):
        print(f"{name}: {accuracy(train, test, tree, epochs=10 if file else 6):.1%} of the words")
