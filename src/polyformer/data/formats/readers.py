"""Readers of files: a generator of rows per format, each row a dict of plain values.

Every reader takes UTF-8 text, or UTF-16 with a byte order mark (image readers take bytes), plain, gzipped or
zstd-compressed, keeps a single row in memory, and names file and line in errors. `header` names the columns
of a file without column names.

Parquet is the exception: it is read in batches of rows, with a limit on its expanded size. A few bytes can
expand to gigabytes: pages are compressed, repeated numbers are counts, and a dictionary stores a long value
once that occurs a million times. So the size that the file states for a row group is checked before the group
is read, columns of lists of texts stay dictionaries until their size is known, and the expanded bytes are
counted before values are made of them. Only the sizes of whole row groups are requested. pyarrow ends the
process if a column is requested whose metadata contradict one another, and raises an error if it reads it.
"""

import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from polyformer.core.errors import InputError, reason_of, unknown
from polyformer.core.ranges import EXPANDED, EXPANSION
from polyformer.data.episodes import read_npz
from polyformer.data.formats.images import SUFFIXES as PICTURES
from polyformer.data.formats.images import read_cifar10, read_cifar100, read_idx, read_image
from polyformer.data.formats.published import BENCHMARK_READERS, read_qnli, read_squad, summary_row
from polyformer.data.formats.tables import SAMPLE, Header, Row, read_csv, read_jsonl, read_tsv
from polyformer.data.sources.files import Remote, lines_of, opened, plain_name, too_large

ROWS, BATCH = 256, 2**31
"""The most rows per batch, and the most bytes of a batch in which each row is as large as its whole group."""

ROW, VALUE = 64, 8
"""Bytes that are counted for every row, and for every value of a list."""


def read_parquet(path: Path | Remote, header: object = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file; raises `InputError` if it is damaged or expands beyond the limit."""
    import pyarrow
    from pyarrow import parquet

    try:
        with _with_parts(path) as binary:
            limit, total = max(EXPANDED, EXPANSION * binary.seek(0, io.SEEK_END)), 0
            metadata = parquet.read_metadata(binary)
            file = parquet.ParquetFile(binary, read_dictionary=_repeated(metadata.schema), metadata=metadata)
            for number in range(metadata.num_row_groups):
                stated = metadata.row_group(number).total_byte_size
                if stated > limit:
                    raise too_large(path)
                for batch in file.iter_batches(max(1, min(ROWS, BATCH // max(1, stated))), [number]):
                    size = ROW * batch.num_rows + sum(map(_bytes, batch.columns))
                    total += size
                    if total > limit:
                        raise too_large(path)
                    yield from _rows(batch, size)
    except (pyarrow.ArrowException, OSError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a Parquet file, or a damaged one ({reason_of(error)})") from error


def _with_parts(path: Path | Remote) -> BinaryIO:
    """Open a file with random access; a remote file that is sent only as a whole is read into memory."""
    file = path.open("rb")
    if file.seekable():
        return file
    with file:
        content = file.read(EXPANDED + 1)
    if len(content) > EXPANDED:
        raise InputError(f"{path}: the server does not send parts of files; fetch it, and name the file here")
    return io.BytesIO(content)


def _repeated(schema: Any) -> list[str]:
    """Return the columns of lists of texts, which are read as dictionary-encoded numbers."""
    columns = (schema.column(number) for number in range(len(schema)))
    texts = "UTF8", "NONE", "ENUM", "JSON", "BSON"
    return [
        column.path
        for column in columns
        if (column.max_repetition_level and column.physical_type == "BYTE_ARRAY")
        and column.converted_type in texts
    ]


def _bytes(array: Any) -> int:
    from pyarrow import types
    from pyarrow.compute import call_function

    kind = array.type
    if types.is_dictionary(kind) and not types.is_primitive(kind.value_type):
        lengths = call_function("binary_length", [array.dictionary])
        return VALUE * len(array) + int(call_function("sum", [lengths.take(array.indices)]).as_py() or 0)
    if types.is_struct(kind):
        return sum(map(_bytes, array.flatten()))
    if types.is_map(kind):
        return _bytes(array.keys) + _bytes(array.items)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return VALUE * len(array) + _bytes(array.flatten())
    return array.nbytes


def _rows(batch: Any, size: int) -> Iterator[Row]:
    """Yield the rows of a batch, converted one by one if they are large."""
    if size <= EXPANDED:
        yield from batch.to_pylist()
        return
    for number in range(batch.num_rows):
        yield from batch.slice(number, 1).to_pylist()


Reader = Callable[[Path, Header], Iterator[Row]]

# Characters; a longer document is read in pieces, to limit the memory and the input of tokenizers.
PIECE = 2**18

_METADATA = re.compile(r"#\s*[\w.:-]+\s*=\s")  # CoNLL-U: "# sent_id = 1"
_TITLE = re.compile(r"\s*= [^=\s].* =\s*")  # WikiText: " = Title = "; sections have more equals signs


def read_text(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield {text}: the file as one document, in pieces of 256 Ki characters and the rest of the line."""
    with opened(path) as file:
        while piece := file.read(PIECE):
            yield {"text": piece + file.readline(PIECE)}


def read_lines(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield {text}: a document per line, without blank lines."""
    with opened(path) as file:
        yield from ({"text": line.rstrip("\r\n")} for line in lines_of(file, path) if line.strip())


def read_paragraphs(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield {text}: a document per run of lines between blank lines."""
    with opened(path) as file:
        for blank, lines in itertools.groupby(lines_of(file, path), key=lambda line: not line.strip()):
            if not blank:
                yield {"text": "".join(lines)}


def read_articles(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield {text}: a document per WikiText article, each headed by ` = Title = ` between blank lines."""
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
    """Yield {source, target} of WikiText articles: the text after the first paragraph, and that paragraph."""
    rows = (summary_row(article["text"]) for article in read_articles(path))
    yield from (row for row in rows if row is not None)


def read_conll(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield a row per sentence, with a token per line and a blank line between sentences.

    Each column becomes a list. Fields are split at tabs, or at spaces if there is no tab. Without `header`
    the first field is the token and the last its tag: {tokens, tags}. The `-DOCSTART-` lines of CoNLL-2003
    and comments are left out.
    """
    sentence: list[Sequence[str]] = []
    names = list(header) if header is not None else ["tokens", "tags"]
    with opened(path) as file:
        lines = lines_of(file, path)
        sample = list(itertools.islice(lines, SAMPLE))
        is_comment = _comments_of_words(sample, path)
        for number, line in enumerate(itertools.chain(sample, lines, [""]), 1):
            if line.strip():
                if is_comment(line, number):
                    continue
                fields = _word_fields(line)
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


def _word_fields(line: str) -> list[str]:
    return line.rstrip("\r\n").split("\t") if "\t" in line else line.split()


def _comments_of_words(sample: Sequence[str], path: Path) -> Callable[[str, int], bool]:
    """Return a function that tells whether a line with its number is a comment, and no word.

    A comment begins with # and has other fields than the words of the `sample`, or is `# name = value`. The
    function raises `InputError` for a line that could be either.
    """
    words = [line for line in sample if line.strip() and not line.startswith("#")]
    tabs = bool(words) and "\t" in words[0]
    width = len(_word_fields(words[0])) if words else 0
    tags = {_word_fields(line)[-1] for line in words}

    def is_comment(line: str, number: int) -> bool:
        fields = _word_fields(line)
        if not line.startswith("#") or not words:
            return False
        if len(fields) != width or ("\t" in line) != tabs or _METADATA.match(line):
            return True
        if fields[0] == "#" and not tabs and fields[-1] not in tags:
            raise InputError(
                f"{path}, line {number}: {line.strip():.40} could be a comment or the word #; remove the "
                "comments, or separate words and tags by tabs"
            )
        return False

    return is_comment


def read_conllu(path: Path, header: Header = None) -> Iterator[Row]:
    """Yield {tokens, tags}: the words of a CoNLL-U treebank with their universal parts of speech (UPOS).

    Contracted words are split into their parts ("zum" into "zu" and "dem"). Source: Universal Dependencies,
    the CoNLL-U format. Comments begin with #. Each word has ten fields; the first, second and fourth are its
    number, the word and UPOS. A number 1-2 marks a contracted word, 1.1 a word that does not appear in the
    text.
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
    """Yield {source, target}: line by line from two files with the same number of lines."""
    with opened(first) as sources, opened(second) as targets:
        for number, (source, target) in enumerate(
            itertools.zip_longest(lines_of(sources, first), lines_of(targets, second))
        ):
            if source is None or target is None:
                short, long = (first, second) if source is None else (second, first)
                raise InputError(
                    f"{short} has {number} lines and {long} has more; parallel files need the "
                    "same number of lines"
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
    **BENCHMARK_READERS,
}

if TYPE_CHECKING:
    Format = str
else:
    Format = Literal[tuple(READERS)]
"""The name of a format."""

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

LOCAL = ("npz",)  # formats that can only be read from a local path
TABLES = ("csv", "tsv", "conll")  # formats of files that may lack column names


def format_of(path: Path | Remote, format: str | None) -> str:
    """Return `format`, or the format by the file's suffix (without `.gz` and `.zst`).

    Raises `InputError` for unknown formats.
    """
    if format is not None:
        if format not in READERS:
            raise unknown("format", format, READERS)
        return format
    name = plain_name(path.name)
    if name.endswith("ubyte"):  # MNIST's names end in "-ubyte" or ".ubyte"
        return "idx"
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path}: its name does not tell its format (known: {', '.join(SUFFIXES)}, also with .gz or "
            f".zst); say format=, one of {', '.join(READERS)}"
        )
    return SUFFIXES[suffix]
