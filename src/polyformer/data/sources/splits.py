"""Data from a single configuration: splits of checked rows as `datasets` objects, in memory or as a stream.

Labels lose the white space around them, and rows without a label are left out of labelled data.
`polyformer.data.sources.origins` describes the names of sources, `polyformer.data.formats.readers` the
formats of files.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Interval

from polyformer.core.config import Config
from polyformer.core.errors import InputError, caution, quote
from polyformer.core.ranges import IMAGE_SIDE, Wording
from polyformer.data.episodes import ROLES, checked_episodes
from polyformer.data.formats.chats import CONVERSATION, PREFERENCE, conversations, preferences
from polyformer.data.formats.columns import CHOICES, rows_of_part, with_choices
from polyformer.data.formats.images import IMAGE, Mode, decoded_rows, default_images
from polyformer.data.formats.published import are_answers
from polyformer.data.formats.readers import Format, Row
from polyformer.data.prepared.rows import PreparedText, open_prepared
from polyformer.data.sources.held_out import select_groups, select_rows, split_rows
from polyformer.data.sources.origins import has_validation, kind_of_source, open_source, source_name


def stripped(value: Any) -> Any:
    """Return a label without the white space around it."""
    return value.strip() if isinstance(value, str) else value


def is_empty(value: object) -> bool:
    """Return whether a label, or a tag in a list, is None, an empty text or NaN."""
    if isinstance(value, list):
        return any(map(is_empty, value))
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def labelled_rows(numbered: Iterable[tuple[int, Row]], column: str, source: str) -> Iterator[tuple[int, Row]]:
    """Yield the numbered rows without those whose label is empty; a warning at the end counts these.

    Raises `InputError` if all labels are empty.
    """
    empty = labelled = 0
    for number, row in numbered:
        if column in row and is_empty(row[column]):
            empty += 1
            continue
        labelled += 1
        yield number, row
    if empty and not labelled:
        raise InputError(
            f"{source}: column {quote(column)} is empty in every row; expected labels: fill it, or name "
            "another column with columns, as in {label: NAME}"
        )
    if empty:
        rows = "1 row without a label is" if empty == 1 else f"{empty:,} rows without a label are"
        caution(f"{source}: {rows} left out")


if TYPE_CHECKING:
    import datasets

    Rows = datasets.Dataset | datasets.IterableDataset | PreparedText

# Expected values by role: in words, for messages, and as a test.
_TEXT = "text", lambda value: isinstance(value, str)
_LIST = "a list of texts", lambda value: isinstance(value, list) and all(isinstance(x, str) for x in value)
_NUMBERS = "a list of numbers, or of lists of numbers", lambda value: isinstance(value, list)
_SINGLE = "a single value", lambda value: isinstance(value, str | int | float)
_TAGS = _LIST[0], lambda value: _LIST[1](value) and not is_empty(value)
_HOLDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    IMAGE: ("an image (bytes)", lambda value: isinstance(value, bytes)),
    "answers": ("answers {text: [...], answer_start: [...]}", are_answers),
    **dict.fromkeys(("text", "pair", "source", "target", "question", "context"), _TEXT),
    **dict.fromkeys((CONVERSATION, *PREFERENCE), _TEXT),
    **dict.fromkeys(("tokens", CHOICES), _LIST),
    "tags": _TAGS,
    **dict.fromkeys(ROLES, _NUMBERS),  # `checked_episodes` checks the numbers
}

HeldOutShare = Annotated[float, Interval(ge=0, le=0.5), Wording("a share")]
ImageSide = Annotated[int, Interval(ge=1, le=IMAGE_SIDE)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """Options of the data; `polyformer.data.sources.origins` describes the names of sources."""

    path: str | None = None  # training source; None: the default text, or the default images
    validation: str | None = None  # another source; None: the source's validation split, or held-out rows
    test: str | None = None
    # None: by the file's name, with "text" for .txt. The first four define the documents of a plain text: the
    # file, a line, a paragraph between blank lines, an article of WikiText.
    format: Format | None = None
    # Column names of a csv, tsv or conll file without a header.
    header: tuple[str, ...] | None = None
    columns: dict[str, str] = field(default_factory=dict)  # role in tasks -> column in the data
    # Column of `path` whose values, train, validation or test, select the rows for training; `validation` and
    # `test` may name the same source again for their rows. None: all rows.
    split: str | None = None
    image_size: tuple[ImageSide, ImageSide] | None = None  # (height, width): images are scaled and cropped
    image_mode: Mode | None = None  # grey or colour for all images; None: unchanged
    streaming: bool = False  # read during training, for data larger than memory
    validation_fraction: HeldOutShare = 0.05  # held out, evenly spaced
    test_fraction: HeldOutShare = 0.0  # held out first; not with streaming or a test source
    # Column of groups that stay together, for example "article" in SQuAD, or "source" of pairs.
    together: str | None = None

    def __post_init__(self) -> None:
        if self.test_fraction and (self.test or self.streaming):
            raise InputError("test_fraction: rows are held out in memory, and where no test source is named")


class Splits(NamedTuple):
    """Rows for training, validation and test; None if there are none."""

    train: "Rows"
    validation: "Rows | None"
    test: "Rows | None"


def load(config: DataConfig, needs: Sequence[str]) -> Splits:
    """Load the splits of `config`. Every row is a dict of exactly the columns in `needs`.

    `needs`: "text" for language models; "text" and "label"; "source" and "target"; "tokens" and "tags"
    (lists); "question", "context" and "answers"; "text", "choices" (a list) and "label"; "image" (bytes),
    "height" and "width"; "observations", "actions" and "rewards" (see `polyformer.data.episodes`);
    "conversation"; "chosen" and "rejected" (see `polyformer.data.formats.chats`).
    Prepared text is a `PreparedText`, with rows that also contain their tokens.

    In memory, splits are `datasets.Dataset`, with `streaming` `datasets.IterableDataset`. Both have the same
    rows, except for the held-out part of groups (`together`), and of a few texts that would give fewer than
    two for validation. Labels
    are as in the file without white space around them: texts from CSV and TSV, names if a saved data set has
    names. Rows with an empty label are left out, with a warning.
    """
    if kind_of_source(config.path) == "prepared":
        return _prepared_splits(config, needs)
    test = read(config, needs, config.test, "test") if config.test else None
    name = config.validation or (config.path if has_validation(config.path) else None)
    validation = read(config, needs, name, "validation") if name else None
    if config.test_fraction or (config.validation_fraction and validation is None):
        return _hold_out(config, needs, validation, test)
    return Splits(read(config, needs, config.path), validation, test)


def read(config: DataConfig, needs: Sequence[str], path: str | None, split: str = "train") -> "Rows":
    """Read all rows of a source, see `load`; `split` selects a split if there are several."""
    if path is not None and kind_of_source(path) == "prepared":
        return _prepared(path, needs, split)
    if config.streaming:
        return _streamed(config, needs, path, split)
    return _in_memory(list(_rows(config, needs, path, split)), path)


def _prepared_splits(config: DataConfig, needs: Sequence[str]) -> Splits:
    """Return the held-out part of prepared text, or the validation source that replaces it."""
    if config.test_fraction:
        raise InputError(
            f"test_fraction: {config.path} is prepared text, which has its own held-out part; set it to 0"
        )
    assert config.path is not None
    train = _prepared(config.path, needs, "train")
    if config.validation is not None:
        validation = read(config, needs, config.validation, "validation")
    else:
        validation = open_prepared(config.path, "validation")
    return Splits(train, validation, read(config, needs, config.test, "test") if config.test else None)


def _prepared(path: str, needs: Sequence[str], split: str) -> PreparedText:
    """Return a split of prepared text, or the training split if it does not exist."""
    if tuple(needs) != ("text",):
        raise InputError(f"{path}: prepared text, and this task needs {', '.join(needs)}; name its rows")
    text = open_prepared(path, "validation" if split != "train" else split) or open_prepared(path, "train")
    if text is None:
        raise InputError(f"{path}: empty: there is nothing to read in it")
    return text


def _hold_out(
    config: DataConfig, needs: Sequence[str], validation: "Rows | None", test: "Rows | None"
) -> Splits:
    """Hold out rows for the test, then rows for validation unless there are some.

    Evenly spaced, without randomness; of a few texts, their ends.
    """
    if config.streaming:
        options = config, needs, config.path, "train", config.validation_fraction
        return Splits(_streamed(*options, held=False), _streamed(*options, held=True), test)
    together = (config.together,) if config.together is not None else ()
    kept = list(_rows(config, tuple(dict.fromkeys((*needs, *together))), config.path, "train"))
    splits: dict[str, Rows | None] = {"validation": validation, "test": test}
    for split, fraction in (("test", config.test_fraction), ("validation", config.validation_fraction)):
        if fraction and splits[split] is None:
            kept, held = split_rows(kept, needs, fraction, config.together)
            if not kept or not held:
                raise InputError(
                    f"{split}_fraction: {source_name(config.path)} is too short to hold so much of it out; "
                    f"name a {split} source, or set {split}_fraction=0"
                )
            splits[split] = _in_memory(_needed(held, needs), config.path)
    return Splits(_in_memory(_needed(kept, needs), config.path), **splits)


def _needed(rows: list[Row], needs: Sequence[str]) -> list[Row]:
    """Return the rows with only the required columns."""
    return [{name: row[name] for name in needs} for row in rows]


def _in_memory(rows: list[Row], path: str | None) -> "datasets.Dataset":
    import datasets
    import pyarrow

    try:
        return datasets.Dataset.from_list(rows)
    except (pyarrow.ArrowException, TypeError, OverflowError) as error:
        raise InputError(f"{source_name(path)}: a column holds values of several types ({error})") from error


def _streamed(
    config: DataConfig,
    needs: Sequence[str],
    path: str | None,
    split: str,
    fraction: float = 0,
    held: bool = False,
) -> "datasets.IterableDataset":
    import datasets

    options = {
        "config": config,
        "needs": tuple(needs),
        "path": path,
        "split": split,
        "fraction": fraction,
        "held": held,
    }
    if next(_stream(**options), None) is None:  # to report problems of a source before training
        raise InputError(f"{source_name(path)}: no row to hold out for validation; name a validation source")
    return datasets.IterableDataset.from_generator(_stream, gen_kwargs=options)


def _stream(
    config: DataConfig, needs: tuple[str, ...], path: str | None, split: str, fraction: float, held: bool
) -> Iterator[Row]:
    together = config.together if fraction else None
    if together is None:
        rows = _rows(config, needs, path, split)
        yield from select_rows(rows, fraction, held) if fraction else rows
        return
    grouped = _rows(config, tuple(dict.fromkeys((*needs, together))), path, split)
    for row in select_groups(grouped, fraction, held, together):
        yield {name: row[name] for name in needs}


def _rows(config: DataConfig, needs: Sequence[str], path: str | None, split: str) -> Iterator[Row]:
    """Yield the rows of a source; raises `InputError` if it is empty."""
    rows = checked_rows(config, needs, path, split)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{source_name(path)}: empty: there is nothing to read in it")
    yield first
    yield from rows


def checked_rows(config: DataConfig, needs: Sequence[str], path: str | None, split: str) -> Iterator[Row]:
    """Yield the rows of a source, maybe none, each checked and reduced to the required columns."""
    numbered: Iterable[tuple[int, Row]] = enumerate(_source(config, needs, path, split), 1)
    if "label" in needs:
        numbered = labelled_rows(numbered, config.columns.get("label", "label"), _place(config, path, split))
    for number, row in numbered:
        chosen = {}
        for role in needs:
            column = config.columns.get(role, role)
            if column not in row:
                raise _no_column(config, path, f"{_place(config, path, split)}, row {number}", role, row)
            value = chosen[role] = stripped(row[column]) if role == "label" else row[column]
            expected, fits = _HOLDS.get(role, _SINGLE)
            if not fits(value):
                where = f"{_place(config, path, split)}, row {number}: column {quote(column)}"
                way = "; give every word a tag" if role == "tags" and is_empty(value) else ""
                raise InputError(f"{where} holds {quote(value)}, expected {expected}{way}")
        yield chosen


def _source(config: DataConfig, needs: Sequence[str], path: str | None, split: str) -> Iterator[Row]:
    """Return the rows of a source before the check of columns."""
    images = IMAGE in needs
    rows = (
        default_images()
        if path is None and images
        else open_source(path, split, config.format, config.header)
    )
    if config.split is not None and _has_parts(config, path):
        rows = rows_of_part(rows, config.split, split, source_name(path))
    if ROLES[0] in needs:
        return checked_episodes(rows, config.columns, source_name(path))
    if CONVERSATION in needs:
        return conversations(rows, config.columns, source_name(path))
    if PREFERENCE[0] in needs:
        return preferences(rows, config.columns, source_name(path))
    if CHOICES in needs:
        return with_choices(rows, config.columns, source_name(path))
    if not images:
        return rows
    column = config.columns.get(IMAGE, IMAGE)
    return decoded_rows(rows, column, source_name(path), config.image_size, config.image_mode)


def _place(config: DataConfig, path: str | None, split: str) -> str:
    """Return the name of the rows in messages: the source, and its part if a column names parts."""
    part = f" ({split} rows)" if _has_parts(config, path) else ""
    return f"{source_name(path)}{part}"


def _has_parts(config: DataConfig, path: str | None) -> bool:
    """Return whether a column of the source says to which part a row belongs; other sources are one part."""
    return config.split is not None and path == config.path


def _no_column(config: DataConfig, path: str | None, where: str, role: str, row: Row) -> InputError:
    column = config.columns.get(role, role)
    names = ", ".join(map(quote, row))
    asked = quote(column) if column == role else f"{quote(column)} (columns gives it for {quote(role)})"
    spare = [name for name in row if role not in ROLES or name not in ROLES]
    way = f"say which one is the {role} with columns, as in {{{role}: {next(iter(spare), 'name'):.40}}}"
    if row and not spare:
        way = f"an episode needs its {role}, a list with an entry for each step; add them to every row"
    if config.header is None and {config.format, *Path(path or "").suffixes} & {"csv", "tsv", ".csv", ".tsv"}:
        way += "; if the first line is not a heading, name the columns with header"
    return InputError(f"{where}: no column {asked}; it has {names or 'none'}: {way}")
