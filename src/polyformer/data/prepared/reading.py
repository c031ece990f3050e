"""Input of the preparation: documents of many sources, the held-out documents, and blocks.

The end of a block depends only on the texts, and a block can be read again from the end of the previous
block. So the result depends neither on the number of workers nor on interruptions.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyformer.data.fingerprint import of_file
from polyformer.data.formats import PIECE
from polyformer.data.held_out import EvenSelection
from polyformer.data.hub_data import HUB
from polyformer.data.library_text import LIBRARY
from polyformer.data.origins import matching, source_files
from polyformer.data.prepared.manifest import Place, Settings, Source
from polyformer.data.remote import Remote
from polyformer.data.sources import DataConfig, checked_rows


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
