"""The inputs of a command: texts that it reads one by one, and a model with rows of equally long texts.

A text is an argument TEXT, or comes from a file (--file) or standard input. A file is one text, and with
--lines a text per line. Standard input has a text per line, as other commands of a pipe read it; `--file -`
reads it as a file.

A model is a run, a checkpoint or a preset. Its texts are concatenated and cut into rows of one length, so
that no row is padded.
"""

import io
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from polyformer.cli.commands.options import option
from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from torch import Tensor

    from polyformer.data import DataConfig, Tokenizer
    from polyformer.models.architectures import Transformer

LINES = 256  # per batch: enough to sort by length, few enough to print results early

STANDARD_INPUT = "-"


def text_file(texts: str = "TEXT") -> Any:
    """Declare the option --file."""
    return option(
        f"read one text from this file instead of {texts}; - is standard input (see --lines)", metavar="PATH"
    )


def text_lines() -> Any:
    """Declare the option --lines."""
    return option("each line of --file or of standard input is a text", False)


def input_lines(texts: Sequence[str], file: str | None = None, lines: bool = False) -> Iterator[list[str]]:
    """Return the input texts in lists of at most `LINES`: `texts`, the text or lines of `file`, or lines.

    Without `texts` and `file` the lines are those of standard input.

    Raises:
        InputError: There are no texts, several sources, an empty text, or the name of a file as a text.
    """
    if texts and (file is not None or lines):
        flag = "--lines" if file is None else "--file"
        raise InputError(f"{flag}: not available with texts as arguments; leave out one of them")
    if texts:
        check_texts("TEXT", texts)
        return iter([list(texts[start : start + LINES]) for start in range(0, len(texts), LINES)])
    if file is not None:
        return _in_batches(_lines(file)) if lines else iter([[whole_text(file)]])
    check_standard_input()
    batches = _in_batches(_standard_lines())
    return batches if lines else _with_note(batches)


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Raise `InputError` if a text of the argument `name` is empty, or the name of an existing file."""
    if not all(text.strip() for text in texts):
        raise InputError(f"{name}: expected a text, got only white space")
    refuse_file_names(name, texts)


def refuse_file_names(name: str, texts: Sequence[str]) -> None:
    """Raise `InputError` if a text of the argument `name` is the name of an existing file."""
    for text in texts:
        if os.path.isfile(text):  # unlike the methods of Path, False for a text that is too long for a name
            raise InputError(
                f"{name}: expected a text, got the name of a file, {quote(text)}; read the text of the file "
                f"with --file {text} (add --lines if each line is a text)"
            )


def check_standard_input() -> None:
    """Raise `InputError` if standard input is a terminal."""
    if sys.stdin.isatty():
        raise InputError(
            'TEXT is missing: give a text in quotes, --file PATH, or lines on standard input (command "..." '
            "< FILE)"
        )


def whole_text(file: str) -> str:
    """Return the text of `file` without line ends at its end; raise `InputError` if there is none."""
    from polyformer.applications.loaded.base import Verbatim

    if file == STANDARD_INPUT:
        text = "".join(_standard_lines()).removeprefix("\ufeff")
    else:
        text = "".join(_lines(file))
    if not text.strip():
        raise InputError(f"--file: expected a text, got only white space in {file}")
    return Verbatim(text.rstrip("\r\n"))


def _lines(file: str) -> Iterator[str]:
    """Yield the lines of a file, which may be compressed, with their ends."""
    from polyformer.data.sources.files import lines_of, opened

    if file == STANDARD_INPUT:
        yield from _standard_lines()
        return
    path = Path(file)
    try:
        with opened(path) as opened_file:
            yield from lines_of(opened_file, path)
    except InputError as error:
        raise InputError(f"--file: {error}") from error


def _standard_lines() -> Iterator[str]:
    """Yield the lines of standard input, decoded as those of files are, with their ends."""
    from polyformer.data.sources.files import DecodedText

    check_standard_input()
    binary = getattr(sys.stdin, "buffer", None)
    if not isinstance(binary, io.BufferedReader):  # replaced by other text
        yield from sys.stdin
        return
    text = DecodedText(binary, "standard input")
    try:
        yield from text
    finally:
        text.detach()  # to leave standard input open


def _in_batches(lines: Iterable[str]) -> Iterator[list[Any]]:
    """Yield `lines` without their ends in lists of at most `LINES`."""
    from polyformer.applications.loaded.base import Verbatim

    # A byte order mark, as in files, is no part of the first text.
    texts = (
        Verbatim(line.rstrip("\r\n").removeprefix("" if number else "\ufeff"))
        for number, line in enumerate(lines)
    )
    while batch := list(itertools.islice(texts, LINES)):
        yield batch


def _with_note(batches: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield `batches` of standard input; if it has several lines, a note says that each is a text."""
    first = next(batches, [])
    if len(first) > 1:
        print(
            "polyformer: each line of standard input is a text (as with --lines); --file - reads one text",
            file=sys.stderr,
        )
    yield from itertools.chain([first] if first else [], batches)


def split_at_tabs(lines: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts before and after the tab of each line; raise `InputError` for other lines."""
    from polyformer.applications.loaded.base import Verbatim

    pairs = [[*map(Verbatim, line.split("\t"))] for line in lines]
    for line, texts in zip(lines, pairs):
        if len(texts) != 2:
            raise InputError(f"TEXT: expected two texts separated by a tab in each line, got {quote(line)}")
    return [first for first, _ in pairs], [second for _, second in pairs]


CHARACTERS = 32
"""Characters of a long text to read per required token; few tokens are longer."""


@dataclass(frozen=True)
class ModelAndTexts:
    """A model and its texts: `columns` of `data`, the last column for the decoder."""

    model: "Transformer"
    tokenizer: "Tokenizer"
    data: "DataConfig"
    columns: tuple[str, ...]


def load(name: str, path: str | None, device: str, overrides: dict[str, Any] | None = None) -> ModelAndTexts:
    """Load a run, a checkpoint, or a preset with `overrides` and random weights, with the texts in `path`.

    The default texts are the run's training data, or the default text.
    """
    from polyformer.data import DataConfig
    from polyformer.data.tokenizers import load_tokenizer
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.recipes.recipe import with_data
    from polyformer.training.recipes.run import Run, choose_device, is_checkpoint, open_model

    folder, columns = Path(name), ("text",)
    data = DataConfig()
    if (folder / RECIPE).is_file():
        run = Run.open(folder)
        needs = run.recipe.task.needs
        columns = tuple(column for column in needs if column in ("text", "tokens", "source", "target"))
        if not columns:
            raise InputError(f"{folder}: the task {quote(run.recipe.task.kind)} of this run reads no text")
        model, tokenizer, data = run.model(device), run.tokenizer, run.recipe.data
    elif is_checkpoint(folder):
        model = open_model(folder, device)
        tokenizer = load_tokenizer(folder)
    else:
        model, tokenizer = random_preset(name, overrides or {})
        model = model.to(choose_device(device))
        print(f"{name}: preset with random weights; its tokens are bytes")
    if path is not None:
        data = DataConfig.from_dict(with_data(data.to_dict(), path), "data")
    return ModelAndTexts(model, tokenizer, data, columns)


def random_preset(name: str, overrides: dict[str, Any]) -> "tuple[Transformer, Tokenizer]":
    """Return the preset `name` with `overrides`, random weights (seed 0), and a byte tokenizer."""
    import torch

    from polyformer.data import TokenizerConfig, build_tokenizer
    from polyformer.models.config import ModelConfig
    from polyformer.models.presets import create_model, model_config

    config = model_config(name, overrides)
    if not isinstance(config, ModelConfig):
        raise InputError(f"{name}: this model reads no text")
    vocabulary = config.vocab_size
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="bytes"), [])
    if len(tokenizer) > vocabulary:
        raise InputError(
            f"{name}: expected a vocabulary of {len(tokenizer)} or more for bytes, got {vocabulary}"
        )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return create_model(name, **overrides), tokenizer


def model_inputs(source: ModelAndTexts, length: int, number: int) -> "list[dict[str, Tensor]]":
    """Return the model inputs of at most `number` texts of `length` tokens."""
    import torch

    def rows(column: str) -> list[torch.Tensor]:
        device = next(source.model.parameters()).device
        return [torch.tensor([ids], device=device) for ids in token_rows(source, column, length, number)]

    inputs = rows(source.columns[0])
    if source.model.encoder is None or source.model.decoder is None:
        return [{"input_ids": ids} for ids in inputs]
    targets = rows(source.columns[-1]) if len(source.columns) > 1 else inputs
    return [{"input_ids": ids, "decoder_input_ids": target} for ids, target in zip(inputs, targets)]


def token_rows(source: ModelAndTexts, column: str, length: int, number: int) -> list[list[int]]:
    """Return at most `number` rows of `length` tokens from the concatenated texts of a column.

    If the tokenizer has these tokens, each text ends with <eos> or <sep>, and each row begins with <bos> or
    <cls>.
    """
    tokenizer = source.tokenizer
    begin = [token for token in (tokenizer.bos_id, tokenizer.cls_id) if token is not None][:1]
    end = [token for token in (tokenizer.eos_id, tokenizer.sep_id) if token is not None][:1]
    step = length - len(begin)
    tokens: list[int] = []
    for text in texts(source, column):
        tokens += tokenizer.encode(text[: CHARACTERS * length * number]) + end
        if len(tokens) >= step * number:
            break
    rows = [begin + tokens[i : i + step] for i in range(0, len(tokens) - step + 1, step)][:number]
    if not rows:
        raise InputError(
            f"--length: the texts have {len(tokens)} tokens in total, too few for {length}; "
            "use more text (--data) or a smaller --length"
        )
    return rows


def texts(source: ModelAndTexts, column: str) -> Iterator[str]:
    """Yield the texts of a column lazily."""
    from polyformer.data import read

    data = replace(source.data, streaming=True, test_fraction=0.0)
    for row in cast("Iterable[dict[str, Any]]", read(data, (column,), data.path)):
        yield row[column] if isinstance(row[column], str) else " ".join(row[column])
