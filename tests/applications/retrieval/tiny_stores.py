"""A checkpoint of a few thousand parameters that reads bytes, and stores of what it reads."""

from collections.abc import Iterator
from pathlib import Path

import torch

from polyformer import create_model
from polyformer.applications.retrieval.entries import Manifest
from polyformer.applications.retrieval.readers import ContextReader, Reading, open_reader
from polyformer.applications.retrieval.store import build
from polyformer.data import DataConfig, TokenizerConfig, build_tokenizer
from polyformer.data.sources.checks import fingerprint
from polyformer.models.architectures import Transformer

TEXT = "".join(f"{number} green bottles hang on the wall of house {number % 7}\n" for number in range(60))
READING = Reading(length=32, context=8)


def tiny_model(seed: int = 0) -> Transformer:
    """A decoder of two layers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        options = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 260}
        return create_model("decoder-tiny", num_hidden_layers=2, initializer_range=0.5, **options).eval()


def tiny_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A folder with such a model and a tokenizer of bytes."""
    tiny_model(seed).save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(folder)
    return folder


def manifest(reader: ContextReader, text: Path, part: int = 1, parts: int = 1) -> Manifest:
    """What a store of the file `text` says of itself."""
    return Manifest(
        dimension=reader.dimension,
        **reader.fingerprints,  # type: ignore[arg-type]
        key=reader.key,
        reading=READING,
        text=tuple(fingerprint(DataConfig(path=str(text)), ("text",))["path"]),
        part=part,
        parts=parts,
    )


def lines(text: Path) -> Iterator[str]:
    """Its documents: the lines."""
    return iter(text.read_text().splitlines(keepends=True))


def built(checkpoint: Path, text: Path, folder: Path, part: int = 1, parts: int = 1) -> Path:
    """A store, or a part of one, built in one go."""
    reader = open_reader(checkpoint, "cpu")
    build(reader, lines(text), manifest(reader, text, part, parts), folder)
    return folder


def content(folder: Path) -> tuple[bytes, bytes]:
    """The entries of a store."""
    return (folder / "keys.float16").read_bytes(), (folder / "values.int32").read_bytes()
