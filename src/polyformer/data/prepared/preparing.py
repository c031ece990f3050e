"""Preparation of text: documents, blocks, and shards of token ids by several threads.

The input has documents of many sources, some of them held out. The end of a block depends only on the texts,
and a block can be read again from the end of the previous block. So the result depends neither on the number
of workers nor on interruptions.

A preparation resumes after the last shard. `tokenizers` encodes outside of Python's lock, so that threads are
as fast as processes (two threads are twice as fast as one), share all memory, and always end with the
process. Each thread has a separate tokenizer: otherwise they would wait for the shared cache of words.
"""

import dataclasses
import hashlib
import itertools
import os
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from polyformer.core.errors import InputError, quote
from polyformer.core.files import remove_partials
from polyformer.data.formats.readers import PIECE
from polyformer.data.prepared import (
    ENDS,
    SPLITS,
    TOKENIZER,
    TOKENS,
    Manifest,
    Place,
    Settings,
    ShardWriter,
    Source,
    check_sizes,
    is_prepared,
)
from polyformer.data.sources.checks import of_file
from polyformer.data.sources.files import Remote
from polyformer.data.sources.held_out import EvenSelection
from polyformer.data.sources.libraries import HUB, LIBRARY
from polyformer.data.sources.origins import matching, source_files
from polyformer.data.sources.splits import DataConfig, checked_rows
from polyformer.data.tokenizers import load_tokenizer
from polyformer.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Block:
    """Documents that are encoded together, their held-out flags, and the position after them."""

    texts: list[str]
    held: list[bool]
    after: Place


def sources_of(names: Sequence[str]) -> list[tuple[str, Source]]:
    """Return every file that matches the names and patterns, in order, with its name.

    A directory or a data set of the hub is a single source. Raises `InputError` if there is none.
    """
    sources = []
    for name in names:
        if name.startswith(HUB):
            sources.append((name, Source(name=name)))
        elif name == LIBRARY or Path(name).is_dir():
            sources.append((name, _directory(name)))
        else:
            sources += [(str(file), _file(file)) for file in matching(name)]
    return sources


def _file(file: Path | Remote) -> Source:
    if isinstance(file, Remote):
        return Source(
            name=str(file), bytes=file.bytes, sha256=hashlib.sha256(file.version.encode()).hexdigest()
        )
    known = of_file(file)
    return Source(name=str(file), bytes=known["bytes"], sha256=known["sha256"])


def _directory(name: str) -> Source:
    files = [_file(file) for file in source_files(name)]
    digest = hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()
    return Source(name=name, bytes=sum(file.bytes for file in files), sha256=digest)


def blocks(sources: Sequence[str], settings: Settings, start: Place, size: int) -> Iterator[Block]:
    """Yield blocks of about `size` characters from `start` to the end."""
    share = settings.validation if settings.validation < 1 else 0.0
    first = int(settings.validation) if settings.validation >= 1 else 0
    due, documents = EvenSelection(share, start.due), start.documents
    texts: list[str] = []
    held: list[bool] = []
    characters = 0
    for number in range(start.source, len(sources)):
        begin = start.row if number == start.source else 0
        for row, text in enumerate(
            itertools.islice(texts_of(sources[number], settings), begin, None), begin + 1
        ):
            for piece in pieces(text):
                texts.append(piece)
                held.append(documents < first or due.holds(len(piece)))
                documents += 1
                characters += len(piece)
            if characters >= size:
                yield Block(texts, held, Place(source=number, row=row, due=due.due, documents=documents))
                texts, held, characters = [], [], 0
    yield Block(texts, held, Place(source=len(sources), due=due.due, documents=documents))


def texts_of(source: str, settings: Settings) -> Iterator[str]:
    """Return the texts of a source, which may be empty."""
    columns = {} if settings.column == "text" else {"text": settings.column}
    config = DataConfig(path=source, format=settings.format, columns=columns, streaming=True)
    return (row["text"] for row in checked_rows(config, ("text",), source, "train"))


def pieces(text: str) -> Iterator[str]:
    """Yield `text`, or parts of at most `PIECE` characters, cut after a line if possible, else after a word.

    Encoding a text requires some hundred times its size of memory.
    """
    start = 0
    while len(text) - start > PIECE:
        limit = start + PIECE
        cut = text.rfind("\n", start, limit) + 1 or text.rfind(" ", start, limit) + 1 or limit
        yield text[start:cut]
        start = cut
    yield text[start:]


def sample(names: Sequence[str], settings: Settings, characters: int) -> Iterator[str]:
    """Yield texts to train a tokenizer on: the beginning of each source, about `characters` in total."""
    sources = [name for name, _ in sources_of(names)]
    for source in sources:
        capacity = characters // len(sources)
        for piece in (piece for text in texts_of(source, settings) for piece in pieces(text)):
            yield piece
            capacity -= len(piece)
            if capacity <= 0:
                break


BLOCK = 2**19
"""Characters that a thread encodes at once, unless a shard has fewer tokens."""

SECONDS = 5.0
"""Seconds between two reports."""


class Progress(NamedTuple):
    """Progress of a preparation.

    tokens, documents: in the folder. new, seconds: tokens and time of this run. source, sources: sources
    read, and their total number.
    """

    tokens: int
    documents: int
    new: int
    seconds: float
    source: int
    sources: int


class Encoded(NamedTuple):
    """Documents of a split: ids end to end, the length of each, and counts of their text."""

    ids: np.ndarray
    lengths: np.ndarray
    bytes: int
    words: int
    lossless: bool


def prepare(
    names: Sequence[str], settings: Settings, folder: Path, workers: int, report: Callable[[Progress], None]
) -> Manifest:
    """Prepare the text of the sources `names` in `folder`, or resume its preparation.

    The folder must already contain the tokenizer. The result does not depend on the number of `workers`.
    Raises `InputError` if the folder contains other text, or if the sources are empty.
    """
    if workers < 1:
        raise InputError(f"workers: expected 1 or more, got {workers}")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    sources = sources_of(names)
    manifest = _resume(folder, tokenizer, settings, tuple(source for _, source in sources))
    if manifest.place is None:
        return manifest
    _remove_unknown(folder, manifest)
    return _Preparing(folder, manifest, report).run([name for name, _ in sources], workers)


def _resume(folder: Path, tokenizer: Tokenizer, settings: Settings, sources: tuple[Source, ...]) -> Manifest:
    """Return the manifest of the folder, with the sources to read; create it if there is none."""
    size = 1 + max(tokenizer.backend.get_vocab(with_added_tokens=True).values())
    if not is_prepared(folder):
        manifest = Manifest(settings=settings, vocab_size=size, sources=sources)
        manifest.write(folder)
        return manifest
    manifest = Manifest.read(folder)
    way = "repeat the command that began it, or name another folder"
    for name, before in manifest.settings.to_dict().items():
        now = getattr(settings, name)
        if before != now:
            raise InputError(f"{folder}: {name} is {quote(before)} there, got {quote(now)}; {way}")
    place = manifest.place or Place(source=max(len(sources), len(manifest.sources)))
    done = place.source + (place.row > 0)
    for before, now in zip(manifest.sources[:done], sources):
        if (before.bytes, before.sha256) != (now.bytes, now.sha256):
            raise InputError(f"{folder}: holds text of {before.name}, which has changed since; {way}")
    if len(sources) < min(done, len(manifest.sources)) or (
        manifest.place is None and len(sources) > len(manifest.sources)
    ):
        raise InputError(f"{folder}: made of {len(manifest.sources)} sources, got {len(sources)}; {way}")
    check_sizes(folder, manifest)
    return dataclasses.replace(manifest, sources=sources)


def _remove_unknown(folder: Path, manifest: Manifest) -> None:
    """Remove the files of a killed process: partial files, and shards that are not in the manifest."""
    remove_partials(folder)
    known = {f"{shard.name}.{suffix}" for shard in manifest.shards for suffix in (TOKENS, ENDS)}
    for split in SPLITS:
        for file in folder.glob(f"{split}-*.*"):
            if file.name not in known:
                file.unlink()


class _Preparing:
    """The state of a running preparation."""

    def __init__(self, folder: Path, manifest: Manifest, report: Callable[[Progress], None]):
        self.folder, self.manifest, self.report = folder, manifest, report
        self.tokens = sum(shard.tokens for shard in manifest.shards)
        self.began = self.said = time.monotonic()
        self.new = 0
        self.writers: dict[str, ShardWriter] = {}

    def run(self, sources: Sequence[str], workers: int) -> Manifest:
        """Prepare all remaining text."""
        settings, dtype = self.manifest.settings, self.manifest.dtype
        assert self.manifest.place is not None
        place, own = self.manifest.place, threading.local()

        def encode(block: Block) -> tuple[Block, dict[str, Encoded]]:
            if not hasattr(own, "tokenizer"):
                own.tokenizer = load_tokenizer(self.folder / TOKENIZER)
            return block, encoded(own.tokenizer, block, dtype)

        self._open()
        try:
            with ThreadPoolExecutor(workers) as pool, _one_thread_each():
                waiting: deque[Future[tuple[Block, dict[str, Encoded]]]] = deque()
                for block in blocks(sources, settings, place, min(BLOCK, settings.shard_tokens)):
                    waiting.append(pool.submit(encode, block))
                    if len(waiting) > workers + 1:
                        place = self._take(waiting.popleft(), len(sources))
                while waiting:
                    place = self._take(waiting.popleft(), len(sources))
            if not place.documents:
                raise InputError(
                    f"{sources[0] if len(sources) == 1 else f'all {len(sources)} sources'}: empty"
                )
            self._commit(None)
        finally:
            for writer in self.writers.values():
                writer.abandon()
        return self.manifest

    def _open(self) -> None:
        number = 1 + max((shard.number for shard in self.manifest.shards), default=-1)
        self.writers = {
            split: ShardWriter(self.folder, split, number, self.manifest.dtype) for split in SPLITS
        }

    def _take(self, encoding: "Future[tuple[Block, dict[str, Encoded]]]", sources: int) -> Place:
        """Write an encoded block; return the position after it."""
        block, parts = encoding.result()
        for split, part in parts.items():
            writer = self.writers[split]
            writer.add(part.ids, part.lengths)
            writer.bytes += part.bytes
            writer.words += part.words
            writer.lossless &= part.lossless
            self.new += len(part.ids)
        if self.writers["train"].tokens >= self.manifest.settings.shard_tokens:
            self._commit(block.after)
            self._open()
        if time.monotonic() > self.said + SECONDS:
            self.said = time.monotonic()
            where = min(block.after.source + 1, sources), sources
            self.report(
                Progress(
                    self.tokens + self.new, block.after.documents, self.new, self.said - self.began, *where
                )
            )
        return block.after

    def _commit(self, place: Place | None) -> None:
        """Finish the shards and add them to the manifest."""
        shards = []
        for writer in self.writers.values():
            if writer.documents:
                shards.append(writer.close())
            else:
                writer.abandon()
        self.writers = {}
        self.manifest = dataclasses.replace(
            self.manifest, shards=(*self.manifest.shards, *shards), place=place
        )
        self.manifest.write(self.folder)


def encoded(tokenizer: Tokenizer, block: Block, dtype: np.dtype) -> dict[str, Encoded]:
    """Return the token ids of a block, by split."""
    parts = {}
    for split in SPLITS:
        texts = [text for text, held in zip(block.texts, block.held) if held == (split == "validation")]
        if texts:
            ids = tokenizer.encode_batch(texts)
            lengths = np.array([len(document) for document in ids], np.int64)
            joined = np.concatenate([np.array(document, dtype) for document in ids])
            counts = _counted(tokenizer, texts, ids) if split == "validation" else (_bytes(texts), 0, True)
            parts[split] = Encoded(joined, lengths, *counts)
    return parts


def _counted(tokenizer: Tokenizer, texts: list[str], ids: list[list[int]]) -> tuple[int, int, bool]:
    """Return bytes, words and whether tokenization is lossless, as in the language model task."""
    composed = [unicodedata.normalize("NFC", text) for text in texts]
    decoded = (unicodedata.normalize("NFC", tokenizer.decode(document)) for document in ids)
    words = sum(len(text.split()) + text.count("\n") for text in composed)
    return _bytes(composed), words, all(text == other for text, other in zip(composed, decoded))


def _bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Disable the threads of `tokenizers`, which would otherwise process each batch with several threads."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before
