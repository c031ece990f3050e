"""The data sets and checkpoints that claims read, so small that a claim takes seconds."""

import gzip
import random
from pathlib import Path

import torch

from polyformer import create_model
from polyformer.data import TokenizerConfig, build_tokenizer

TEXT = "the cat sat on a mat and some dogs ran after it while birds sang above old trees"
WORDS = TEXT.split()
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 3}


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def write_sources(root: Path) -> Path:
    """Write a folder as `polyformer reproduce all --data` reads it."""
    draw = random.Random(0)
    articles = [f" = Title {n} = \n\n {sentence(draw, 400)} .\n\n {TEXT} . {TEXT} .\n\n" for n in range(8)]
    for split, count in (("train", 8), ("valid", 4), ("test", 4)):
        file = root / "wikitext2" / f"{split}.txt.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress("".join(articles[:count]).encode()))
    for split, count in (("train", 60), ("test", 24)):
        rows = [f"{sentence(draw, 6)} {'fine' if n % 2 else 'dull'}\t{n % 2}" for n in range(count)]
        _write(root / "sst2" / f"{split}.tsv", rows)
        reviews = [f"{n % 2}\t{1 + 8 * (n % 2)}\t{sentence(draw, 40 + 8 * n)}" for n in range(count)]
        _write(root / "imdb" / f"{split}.tsv", reviews)
    for split in ("train", "val", "test_2016_flickr"):
        for side in ("en", "de"):
            lines = "".join(f"{sentence(draw, 5)}\n" for _ in range(40))
            file = root / "multi30k" / f"{split}.{side}.gz"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(gzip.compress(lines.encode()))
    lines = ["\n".join(sentence(draw, 10) for _ in range(60)) for _ in range(3)]
    chapters = [f"CHAPTER {'I' * n}\n\n{text}\n\n" for n, text in enumerate(lines, 1)]
    (root / "book.txt").write_text("".join(chapters))
    torch.manual_seed(0)
    models = {
        "decoder": ("decoder-tiny", {"position": "rope"}),
        "encoder": ("encoder-tiny", {"head": "embed"}),
        "exits": ("decoder-tiny", {"depth": "exits(rule=saturation)"}),
    }
    for name, (preset, options) in models.items():
        options = {**SIZES, **options, "vocab_size": 260, "max_position_embeddings": 128}
        create_model(preset, **options).save_pretrained(root / name)
        build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(root / name)
    return root


def _write(file: Path, rows: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(rows) + "\n")
