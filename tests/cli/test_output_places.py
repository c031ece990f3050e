"""Every option that names a place for output: files, links, FIFOs, devices, /dev/stdout, and folders."""

import dataclasses
import os
import shutil
import stat
import threading
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polyformer.cli.commands import COMMANDS, load_command, options_class
from polyformer.cli.commands.options import choices, flag
from polyformer.cli.main import main
from polyformer.core.ops import tuning as store
from polyformer.core.ops.tuning import Section
from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.presets import create_model
from polyformer_lab.bench import attention
from polyformer_lab.bench.attention import AttentionBench

Trained = Callable[[str], Path]
Fields = list[tuple[str, "dataclasses.Field[Any]"]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line that ends with an output option, and how the file's content begins and ends."""

    words: tuple[str, ...]
    suffix: str
    begin: bytes
    end: bytes

    @property
    def command(self) -> tuple[str, str]:
        return self.words[0], self.words[-1]


ABLATE = ("ablate", "decoder-tiny", "--length", "16", "--texts", "1", "--estimate", "--out")
SPECTRUM = ("spectrum", "encoder-tiny", "--length", "16", "--texts", "1", "--out")
SMALL = ("--tasks", "vt", "--lengths", "700", "--samples", "1", "--max-new-tokens", "1")
PROBE = ("probe", "UNLIMITED", *SMALL, "--out")
PNG = b"\x89PNG", b"IEND\xaeB`\x82"
FIT = ("fit-pattern", "LM", "--length", "16", "--budget", "0.9")
CASES = {
    "fitted pattern": Case((*FIT, "--out"), ".txt", b"", b")\n"),
    "fitted heads": Case((*FIT, "--figure"), ".png", *PNG),
    "explore": Case(
        ("explore", "encoder-tiny", "two words", "--out"), ".html", b"<!doctype html", b"</html>\n"
    ),
    "show pattern": Case(("show", "pattern", "Window(2)", "--out"), ".svg", b"<?xml", b"</svg>\n"),
    "show position": Case(("show", "position", "alibi", "--heads", "1", "--out"), ".png", *PNG),
    "ablate figure": Case(ABLATE, ".png", *PNG),
    "spectrum table": Case(SPECTRUM, ".csv", b"stack,", b",1\n"),
    "spectrum figure": Case(SPECTRUM, ".png", *PNG),
    "prompt": Case(("prompt", "LM", "QUESTIONS", "--max-new-tokens", "2", "--out"), ".jsonl", b"{", b"}\n"),
    "probe": Case(PROBE, ".json", b"{", b"}\n"),
    "audit": Case(("audit", "LM", "--checks", "rows", "--json"), ".json", b"{", b"}\n"),
    "audit page": Case(("audit", "LM", "--checks", "rows", "--page"), ".html", b"<!DOCTYPE", b"</html>\n"),
    "tune": Case(("tune", "--threads", "1", "--out"), ".json", b"{", b"}\n"),
    "evaluate": Case(("evaluate", "AGENT", "--device", "cpu", "--episode"), ".png", *PNG),
    "embed": Case(("embed", "ENCODER", "QUESTIONS", "--out"), ".parquet", b"PAR1", b"PAR1"),
}


def fields_of(kinds: set[str]) -> Fields:
    """The fields of all commands' options that name output of these kinds."""
    return [
        (name, field)
        for name in COMMANDS
        for field in dataclasses.fields(options_class(load_command(name)))
        if field.metadata.get("output") in kinds
    ]


@pytest.fixture(scope="module")
def inputs(train_tiny: Trained, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The words of a case: names in capitals become files that are made once."""
    root = tmp_path_factory.mktemp("inputs")

    def questions() -> Path:
        (root / "questions.txt").write_text("line 1\nline 2 of a small\n")
        return root / "questions.txt"

    def encoder() -> Path:
        tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), ["line 1 of a small text"])
        tokenizer.save(root / "encoder")
        create_model("encoder-tiny", vocab_size=len(tokenizer), head="embed").save_pretrained(
            root / "encoder"
        )
        return root / "encoder"

    def unlimited() -> Path:
        """A decoder without a limit of positions."""
        tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
        tokenizer.save(root / "unlimited")
        create_model("decoder-tiny", vocab_size=len(tokenizer), position="rope").save_pretrained(
            root / "unlimited"
        )
        return root / "unlimited"

    def agent() -> Path:
        pytest.importorskip("gymnasium")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("torchrl.collectors")
        from polyformer.training.recipes import Recipe, fit
        from polyformer.training.recipes.recipe import find_recipe, merged

        task = {"environment": "CartPole-v1", "rows": 2, "steps": 8, "segment": 4, "passes": 1}
        task |= {"minibatches": 1, "episodes": 1, "episode_steps": 40}
        changes = {"task": task, "training": {"steps": 1, "engine": {"device": "cpu"}}}
        model = {"preset": "gtrxl", "hidden_size": 8, "memory_length": 4, "intermediate_size": 8}
        fit(Recipe.from_dict({**merged(find_recipe("gtrxl"), changes), "model": model}), root / "agent")
        return root / "agent"

    makers = {"LM": lambda: train_tiny("lm"), "QUESTIONS": questions, "ENCODER": encoder, "AGENT": agent}
    makers |= {"UNLIMITED": unlimited}
    made_files: dict[str, str] = {}

    def value(word: str) -> str:
        if word in makers and word not in made_files:
            made_files[word] = str(makers[word]())
        return made_files.get(word, word)

    return value


@pytest.fixture(autouse=True)
def _nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(store.PIN, raising=False)
    monkeypatch.setattr(Section, "sections", {})


@contextmanager
def reading(descriptor: int) -> Iterator[list[bytes]]:
    """What a thread reads from a descriptor until its writers have closed it."""
    content: list[bytes] = []

    def read() -> None:
        with os.fdopen(descriptor, "rb") as file:
            content.append(file.read())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield content
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def new_file(path: Path) -> Iterator[list[bytes]]:
    content: list[bytes] = []
    yield content
    content.append(path.read_bytes())
    assert not path.is_symlink()


@contextmanager
def old_file(path: Path) -> Iterator[list[bytes]]:
    path.write_bytes(b"old")
    with new_file(path) as content:
        yield content


@contextmanager
def link(path: Path) -> Iterator[list[bytes]]:
    target = path.parent / "elsewhere" / "target"
    path.symlink_to("elsewhere/target")
    with new_file(target) as content:
        yield content
    assert os.readlink(path) == "elsewhere/target"


@contextmanager
def fifo(path: Path) -> Iterator[list[bytes]]:
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    writer = os.open(path, os.O_WRONLY)  # until the end: before the command writes there is no end of file
    with reading(descriptor) as content:
        try:
            yield content
        finally:
            os.close(writer)
    assert stat.S_ISFIFO(path.lstat().st_mode)


@contextmanager
def device(path: Path) -> Iterator[list[bytes]]:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # what /dev/null is
    except PermissionError:
        path.symlink_to("/dev/null")
    before = path.lstat()
    yield []
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert stat.S_ISCHR(path.stat().st_mode)


@contextmanager
def standard_output(path: Path) -> Iterator[list[bytes]]:
    path.symlink_to("/dev/stdout")
    before, (reader, writer) = os.dup(1), os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    with reading(reader) as content:
        try:
            yield content
        finally:
            os.dup2(before, 1)
            os.close(before)
    assert os.readlink(path) == "/dev/stdout"


PLACES = [new_file, old_file, link, fifo, device, standard_output]
SINGLE_PROCESS = (
    "prompt",
    "embed",
)  # which refuse to replace a file: in every place; the others in three, in turn
TRIED = [
    pytest.param(case, PLACES[(i + step) % 6], id=f"{name}-{PLACES[(i + step) % 6].__name__}")
    for i, (name, case) in enumerate(CASES.items())
    for step in (range(6) if name in SINGLE_PROCESS else (0, 2, 3))
]


@pytest.mark.parametrize(("case", "place"), TRIED)
def test_a_place_is_written_and_stays_what_it_is(
    case: Case,
    place: Callable[[Path], Any],
    tmp_path: Path,
    inputs: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
):
    words = [inputs(word) for word in case.words]
    path = tmp_path / f"out{case.suffix}"
    if place is old_file and case.words[0] in SINGLE_PROCESS:
        path.write_bytes(b"old")
        assert main([*words, str(path)]) == 2
        assert path.read_bytes() == b"old", "these two refuse to replace another file"
        return
    capsys.readouterr()
    with place(path) as contents:
        assert main([*words, str(path)]) == 0
    for content in contents:
        assert content.lower().startswith(case.begin.lower())
        assert content.endswith(case.end)
    if place is standard_output:
        assert capsys.readouterr().out == "", "messages go to standard error"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_directory_is_refused_where_a_file_is_expected(
    tmp_path: Path, inputs: Callable[[str], str], complaint: Callable[..., str]
):
    for name, case in CASES.items():
        path = tmp_path / f"{name}{case.suffix}"
        path.mkdir()
        error = complaint(*map(inputs, case.words), path)
        assert f"error: {case.words[-1]}: expected a file, got the directory '{path}'" in error
        assert os.listdir(path) == []


def test_every_option_for_output_has_a_case():
    options = {(name, flag(field)) for name, field in fields_of({"file", "by name"})}
    assert options == {case.command for case in CASES.values()}
    for name in COMMANDS:
        for field in dataclasses.fields(options_class(load_command(name))):
            declared = field.metadata.get("output") is not None
            assert declared or field.name != "out" or name == "record", "a data set's id is no path"


def test_a_folder_is_no_file_fifo_or_device(
    tmp_path: Path, inputs: Callable[[str], str], complaint: Callable[..., str]
):
    folders = [*fields_of({"folder"}), ("embed", fields_of({"by name"})[0][1])]
    assert len(folders) > 5
    kinds = {
        "file": Path.touch,
        "FIFO": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/null"),
    }
    for kind, make in kinds.items():
        (tmp_path / kind).mkdir()
        path = tmp_path / kind / "out"
        make(path)
        before = path.lstat()
        for name, field in folders:
            error = complaint(*command_line(name, field, str(path), inputs))
            assert f"expected a folder, or the name of a new one, got '{path}', which is a {kind}" in error
            assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
            assert os.listdir(tmp_path / kind) == ["out"]


def command_line(
    name: str, field: "dataclasses.Field[Any]", path: str, inputs: Callable[[str], str]
) -> list[str]:
    """The least command line with `path` as the value of the field."""
    if name == "embed":
        return [name, inputs("ENCODER"), inputs("QUESTIONS"), flag(field), path]
    options = options_class(load_command(name))
    hints = typing.get_type_hints(options)
    places = [each for each in dataclasses.fields(options) if each.metadata.get("positional")]
    required = [each for each in places if each.default is dataclasses.MISSING]
    words = [path if each == field else (choices(hints[each.name]) or ["x"])[0] for each in required]
    return [name, *words, *([] if field in required else [flag(field), path])]


def test_a_fifo_in_the_place_of_a_lock_does_not_stop_a_command(
    tmp_path: Path, train_tiny: Trained, complaint: Callable[..., str]
):
    run = shutil.copytree(train_tiny("lm"), tmp_path / "run")
    (run / ".lock").unlink()
    os.mkfifo(run / ".lock")
    assert "expected a file, which is locked, got a FIFO" in complaint("train", "--resume", run)


def test_experiments_refuse_a_file_for_their_folder(tmp_path: Path, complaint: Callable[..., str]):
    (tmp_path / "file").touch()
    error = complaint("reproduce", "warmup", "--out", tmp_path / "file")
    assert "--out: expected a folder, or the name of a new one" in error
    error = complaint("bench", "neighbours", "--folder", tmp_path / "file")
    assert "file" in error


def test_a_bench_follows_links(tmp_path: Path):
    (tmp_path / "out.json").symlink_to("table")
    (tmp_path / "out.png").symlink_to("/dev/null")
    small = {"lengths": (16,), "heads": 2, "width": 8, "repeats": 1, "memory": False, "against": ("sdpa",)}
    attention.run(
        AttentionBench(
            members=("Window(4)",), out=str(tmp_path / "out.json"), plot=str(tmp_path / "out.png"), **small
        )
    )
    assert (tmp_path / "table").read_text().startswith("{")
    assert os.readlink(tmp_path / "out.png") == "/dev/null"
