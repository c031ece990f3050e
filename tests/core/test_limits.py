"""Every limit of the table in SECURITY.md, exceeded: a short message before anything large is allocated."""

import gzip
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyformer.attention.patterns.base import Pattern
from polyformer.core import ranges as limits
from polyformer.core.errors import MESSAGE, QUOTED, InputError, quote
from polyformer.core.files import read_json
from polyformer.core.parsing import parse_expression, parse_json, parse_yaml
from polyformer.core.ranges import LIMITS, limit_table
from polyformer.data.formats.images import read_idx
from polyformer.data.formats.readers import READERS
from polyformer.data.word_vectors import read_word_vectors
from polyformer.models.attached.attach_settings import restore
from polyformer.models.generation.config import BeamConfig, GenerationConfig, WholeLengthConfig
from polyformer.models.presets import model_config
from polyformer_lab.study import Study

ROOT = Path(__file__).parents[2]


def sparse(folder: Path, size: int, name: str = "large") -> Path:
    """A file of that size that takes no room."""
    path = folder / name
    with path.open("wb") as file:
        file.truncate(size)
    return path


def in_label_folder(folder: Path) -> None:
    (folder / "pos").mkdir()
    sparse(folder / "pos", limits.FILE_OF_A_LABEL + 1, "1.txt")
    from polyformer.data.sources.origins import folder_rows

    list(folder_rows(folder))


def zipped(folder: Path) -> None:
    (folder / "a.txt.gz").write_bytes(gzip.compress(bytes(limits.EXPANDED + 2**20)))
    for _ in READERS["text"](folder / "a.txt.gz", None):
        pass


def image_head(folder: Path) -> None:
    (folder / "a.idx").write_bytes(bytes.fromhex("00000803 00000001") + 2 * (2**14).to_bytes(4, "big"))
    list(read_idx(folder / "a.idx"))


def idx_file(folder: Path, name: str, magic: int, *axes: int) -> None:
    """An IDX file whose head tells the truth and whose bytes take no room."""
    size = 4 * (1 + len(axes)) + limits.LABELS + 1
    with sparse(folder, size, name).open("r+b") as file:
        file.write(b"".join(number.to_bytes(4, "big") for number in (magic, *axes)))


def labels(folder: Path) -> None:
    idx_file(folder, "a-labels-idx1-ubyte", 0x801, limits.LABELS + 1)
    idx_file(folder, "a-images-idx3-ubyte", 0x803, limits.LABELS + 1, 1, 1)
    next(read_idx(folder / "a-images-idx3-ubyte"))


def words(folder: Path) -> None:
    (folder / "v.txt").write_text(f"1 {limits.VECTOR_WIDTH + 1}\n")
    read_word_vectors(folder / "v.txt", ["a"])


def many_calls(folder: Path) -> None:
    config = SimpleNamespace(polyformer_attention=[{}] * 1025, _attn_implementation="polyformer")
    restore(SimpleNamespace(config=config))


def command(*options: str) -> Callable[[Path], None]:
    """What a command with an option that is too large raises; its other arguments do not exist."""

    def run(folder: Path) -> None:
        from polyformer.cli.commands import load_command
        from polyformer.cli.commands.options import parse

        parse("generate", load_command("generate"), [str(folder), *options])

    return run


EXCEEDED: dict[str, Callable[[Path], object]] = {
    "a JSON file": lambda folder: read_json(sparse(folder, limits.JSON_BYTES + 1)),
    "a YAML text": lambda folder: parse_yaml(" " * (limits.YAML_BYTES + 1), "it"),
    "an expression": lambda folder: parse_expression(" " * (limits.EXPRESSION_BYTES + 1), "it", "one"),
    "nesting in JSON and YAML": lambda folder: parse_json("[" * 66 + "]" * 66, "it"),
    "nesting in an expression": lambda folder: parse_expression("-" * 129 + "1", "it", "one"),
    "calls and names of layers in `polyformer_attention` of a config.json": many_calls,
    "an integer in a file": lambda folder: parse_json(str(2**65), "it"),
    "a float in a file": lambda folder: parse_json("1e999", "it"),
    "a key in a JSON object": lambda folder: parse_json('{"a": 1, "a": 1}', "it"),
    "a size in a configuration (positions, widths, vocabulary)": lambda folder: model_config(
        "gpt2", {"vocab_size": limits.SIZE + 1}
    ),
    "layers of a stack, also in a GGUF file": lambda folder: model_config(
        "gpt2", {"num_hidden_layers": limits.LAYERS + 1}
    ),
    "a number in a pattern": lambda folder: Pattern.from_text(f"Window({2**31})"),
    "new tokens of a text (`--max-new-tokens`, `--generate`, `GenerationConfig`)": lambda folder: (
        GenerationConfig(max_new_tokens=limits.NEW_TOKENS + 1)
    ),
    "beams or samples per input": lambda folder: GenerationConfig(beam=BeamConfig(num_beams=4097)),
    "any other size on the command line (`--lengths`, `--num-beams`, `--batch-tokens`, ...)": command(
        "--top-k", str(limits.SIZE + 1)
    ),
    "runs of an experiment (the labels of all axes times the seeds)": lambda folder: Study(
        grid={axis: {label: {} for label in range(130)} for axis in "ab"}
    ),
    "a line of text": lambda folder: list(READERS["lines"](sparse(folder, limits.LINE + 1), None)),
    "a text in a folder of labels": in_label_folder,
    "the file of an image": lambda folder: list(
        READERS["image"](sparse(folder, limits.IMAGE_BYTES + 1, "a.png"), None)
    ),
    "pixels of an image": image_head,
    "labels of an IDX file": labels,
    "decompressed data of a gzip, zstd, npz or Parquet file": zipped,
    "dimensions of a word vector": words,
}
SHOWN = {"a value quoted in a message", "a message"}


def test_every_limit_has_a_case():
    assert EXCEEDED.keys() | SHOWN == LIMITS.keys()
    assert limit_table() in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("what", EXCEEDED)
def test_a_file_beyond_a_limit_is_refused(what: str, tmp_path: Path):
    with pytest.raises(InputError) as refused:
        EXCEEDED[what](tmp_path)
    assert len(str(refused.value)) < 300


def test_messages_are_short():
    assert len(quote("x" * 10**6)) <= QUOTED
    assert len(str(InputError("x" * 10**6))) <= MESSAGE


@pytest.mark.parametrize(
    "config",
    [
        {"whole": {"max_length": 10**9}, "max_new_tokens": None},
        {"num_return_sequences": 10**9, "sampling": {"do_sample": True}},
        {"speculation": {"draft_tokens": 10**9}},
        {"min_new_tokens": 10**9},
    ],
)
def test_requests_of_generation(config: dict[str, Any]):
    with pytest.raises(InputError, match=r"expected (at most|1 to) "):
        GenerationConfig.from_dict(config)


def test_new_tokens_are_counted_behind_the_prompt():
    config = GenerationConfig(whole=WholeLengthConfig(max_length=limits.NEW_TOKENS + 9), max_new_tokens=None)
    assert config.lengths(10)[1] == limits.NEW_TOKENS - 1
    with pytest.raises(InputError, match="expected at most 1048576, got 1048577"):
        config.lengths(8)
