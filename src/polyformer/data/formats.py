"""Files to rows: one generator per format, each row a dict of plain values.

Every reader takes UTF-8 text (that of images bytes), plain, gzipped or zstd-compressed, holds one row at a
time, and names file and line in errors; `header` names the columns of a file that does not name them itself.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from polyformer.core.errors import InputError, unknown
from polyformer.data.episodes import read_npz
from polyformer.data.images import read_cifar10, read_cifar100, read_idx
from polyformer.data.opening import lines_of, opened, plain_name
from polyformer.data.pictures import SUFFIXES as PICTURES
from polyformer.data.pictures import read_image
from polyformer.data.qnli import read_qnli
from polyformer.data.remote import Remote
from polyformer.data.squad import read_squad
from polyformer.data.summaries import summary_row
from polyformer.data.tables import Header, Row, read_csv, read_jsonl, read_tsv

Reader = Callable[[Path, Header], Iterator[Row]]

# Characters; a longer document is read in pieces, so that neither memory nor tokenizers choke on it.
PIECE = 2**18

ROWS = 1024
"""Of a Parquet file, so many rows are held at a time."""

_TITLE = re.compile(r"\s*= [^=\s].* =\s*")  # WikiText: " = Title = "; its sections have more signs


def read_text(path: Path, header: Header = None) -> Iterator[Row]:
    """{text}: the file as one document, in pieces of 256 Ki characters and the rest of the line."""
    with opened(path) as file:
        while piece := file.read(PIECE):
            yield {"text": piece + file.readline(PIECE)}


def read_lines(path: Path, header: Header = None) -> Iterator[Row]:
    """{text}: a document per line, blank lines left out."""
    with opened(path) as file:
        yield from ({"text": line.rstrip("\r\n")} for line in lines_of(file, path) if line.strip())


def read_paragraphs(path: Path, header: Header = None) -> Iterator[Row]:
    """{text}: a document per run of lines between blank ones."""
    with opened(path) as file:
        for blank, lines in itertools.groupby(lines_of(file, path), key=lambda line: not line.strip()):
            if not blank:
                yield {"text": "".join(lines)}


def read_articles(path: Path, header: Header = None) -> Iterator[Row]:
    """{text}: a document per article of WikiText, each headed by ` = Title = ` between blank lines."""
    article: list[str] = []
    with opened(path) as file:
        lines = itertools.chain(lines_of(file, path), [""])
        before, line = "", next(lines)
        for after in lines:
            if (
                _TITLE.fullmatch(line)
                and not before.strip()
                and not after.strip()
                and any(map(str.strip, article))
            ):
                yield {"text": "".join(article)}
                article = []
            article.append(line)
            before, line = line, after
    if any(map(str.strip, article)):
        yield {"text": "".join(article)}


def read_summaries(path: Path, header: Header = None) -> Iterator[Row]:
    """{source, target}: of every article of WikiText all but its first paragraph, and that."""
    rows = (summary_row(article["text"]) for article in read_articles(path))
    yield from (row for row in rows if row is not None)


def read_parquet(path: Path, header: Header = None) -> Iterator[Row]:
    """The rows of a Parquet file, batch by batch; `InputError` where it is damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as binary, parquet.ParquetFile(binary) as file:
            for batch in file.iter_batches(batch_size=ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: not a Parquet file, or a damaged one ({str(error).splitlines()[0]})"
        ) from error


def read_conll(path: Path, header: Header = None) -> Iterator[Row]:
    """A token per line, a blank line between sentences; each column becomes a list.

    Fields are split at tabs, or at spaces where there is no tab. Without `header` the first field is the
    token and the last its tag: {tokens, tags}. Lines of CoNLL-2003's `-DOCSTART-` are left out.
    """
    sentence: list[Sequence[str]] = []
    names = list(header) if header is not None else ["tokens", "tags"]
    with opened(path) as file:
        for number, line in enumerate(itertools.chain(lines_of(file, path), [""]), 1):
            if line.strip():
                fields = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
                if header is None and len(fields) > 1:
                    fields = [fields[0], fields[-1]]
                if len(fields) != len(names):
                    raise InputError(
                        f"{path}, line {number}: {len(fields)} fields where {len(names)} are expected "
                        f"({', '.join(names)}): {line.strip():.40}"
                    )
                if fields[0] != "-DOCSTART-":
                    sentence.append(fields)
            elif sentence:
                yield {name: list(column) for name, column in zip(names, zip(*sentence))}
                sentence = []


def read_conllu(path: Path, header: Header = None) -> Iterator[Row]:
    """{tokens, tags}: the words of a treebank in CoNLL-U with their universal parts of speech (UPOS).

    The parts of a contracted word count ("zum" is "zu" and "dem"), not the word. Source: Universal
    Dependencies, the CoNLL-U format: comments begin with #, ten fields a word, its number, itself and UPOS
    being the first, second and fourth; 1-2 numbers a contracted word, 1.1 one that is not written.
    """
    tokens: list[str] = []
    tags: list[str] = []
    with opened(path) as file:
        for number, line in enumerate(itertools.chain(lines_of(file, path), [""]), 1):
            fields = line.rstrip("\r\n").split("\t")
            if not line.strip():
                if tokens:
                    yield {"tokens": tokens, "tags": tags}
                tokens, tags = [], []
            elif line.startswith("#"):
                continue
            elif len(fields) != 10:
                raise InputError(
                    f"{path}, line {number}: {len(fields)} fields where CoNLL-U has 10: {line.strip():.40}"
                )
            elif fields[0].isdigit():
                tokens.append(fields[1])
                tags.append(fields[3])


def read_pairs(first: Path, second: Path) -> Iterator[Row]:
    """{source, target}: line by line from two files of as many lines."""
    with opened(first) as sources, opened(second) as targets:
        for number, (source, target) in enumerate(
            itertools.zip_longest(lines_of(sources, first), lines_of(targets, second))
        ):
            if source is None or target is None:
                short, long = (first, second) if source is None else (second, first)
                raise InputError(
                    f"{short} ends after {number} lines and {long} goes on: parallel files need as many"
                )
            yield {"source": source.rstrip("\r\n"), "target": target.rstrip("\r\n")}


READERS: dict[str, Reader] = {
    "text": read_text,
    "lines": read_lines,
    "paragraphs": read_paragraphs,
    "articles": read_articles,
    "summaries": read_summaries,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
    "conll": read_conll,
    "conllu": read_conllu,
    "idx": read_idx,
    "image": read_image,
    "cifar10": read_cifar10,
    "cifar100": read_cifar100,
    "squad": read_squad,
    "qnli": read_qnli,
    "npz": read_npz,
}

SUFFIXES = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".conll": "conll",
    ".conllu": "conllu",
    ".bio": "conll",
    ".annotated": "conll",
    ".npz": "npz",
    **dict.fromkeys(PICTURES, "image"),
}

LOCAL = ("npz",)  # the formats whose readers open the file by its name
TABLES = ("csv", "tsv", "conll")  # the formats whose files may not name their columns


def format_of(path: Path | Remote, format: str | None) -> str:
    """`format`, or the one that the file's name tells (`.gz` and `.zst` left aside); `InputError` for unknown
    ones."""
    if format is not None:
        if format not in READERS:
            raise unknown("format", format, READERS)
        return format
    name = plain_name(path.name)
    if name.endswith("ubyte"):  # what follows the last point, or hyphen, in the names of MNIST's files
        return "idx"
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path}: its name does not tell its format (known: {', '.join(SUFFIXES)}, also with .gz or "
            f".zst); say format=, one of {', '.join(READERS)}"
        )
    return SUFFIXES[suffix]
