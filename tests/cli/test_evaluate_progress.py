"""`polyformer evaluate --progress`: what was killed goes on, and nothing that is wrong is taken up."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import byte_files, save

from forking import start_python
from full_disk import largest_file
from polyformer.cli.main import main
from polyformer.core.files import read_tensors, write_tensors
from polyformer.training.task import CachedResults

FILE = "process-0.jsonl"


def measured(*arguments: object) -> list[str]:
    return ["evaluate", *map(str, arguments), "--device", "cpu"]


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    (tmp_path / "gpt2").mkdir()
    save(tmp_path / "gpt2", "gpt2", byte_files(tmp_path / "gpt2", "gpt2"))
    return tmp_path / "gpt2"


def words(path: Path, lines: int) -> Path:
    path.write_text("".join(f"{number} words stand here and {number % 7} more\n" for number in range(lines)))
    return path


def test_a_killed_evaluation_goes_on(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, folder = words(tmp_path / "words.txt", 12_000), tmp_path / "progress"
    command = measured(gpt2, "--data", data, "--length", 16)
    process = start_python("-m", "polyformer", *command, "--progress", folder)
    deadline = time.monotonic() + 120
    while not (folder / FILE).is_file() or (folder / FILE).read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    ended = process.ended()
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "")
    assert main(command) == 0
    expected = capsys.readouterr().out
    assert main([*command, "--progress", str(folder)]) == 0
    said = capsys.readouterr()
    assert said.out == expected
    reused, every = (int(word.replace(",", "")) for word in said.err.split() if word[0].isdigit())
    assert 2 <= reused < every


def test_texts_are_written_once(
    train_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "pairs.tsv"
    data.write_text("source\ttarget\n" + "".join(f"word {i}\tWort {i}\n" for i in range(7)))
    command = measured(train_tiny("translate"), "--data", data)
    capsys.readouterr()
    assert main(command) == 0
    expected = capsys.readouterr().out
    command += ["--progress", str(tmp_path / "progress")]
    assert main(command) == 0
    assert capsys.readouterr() == (expected, "")
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out == expected
    lines = (tmp_path / "progress" / FILE).read_text().split("\n")
    total = sum(map(bool, lines))
    assert total > 7
    assert f"reused the results of {total} of {total} batches and texts" in said.err


def test_other_weights_data_or_lengths_find_nothing(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, other = words(tmp_path / "words.txt", 30), tmp_path / "other.txt"
    other.write_text(data.read_text().replace("words", "swords", 1).replace("words", "word", 1))
    progress = ["--progress", str(tmp_path / "progress")]
    assert main([*measured(gpt2, "--data", data, "--length", 16), *progress]) == 0
    assert main([*measured(gpt2, "--data", data, "--length", 8), *progress]) == 0
    assert main([*measured(gpt2, "--data", other, "--length", 16), *progress]) == 0
    weights = read_tensors(gpt2 / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1e-3
    write_tensors(gpt2 / "model.safetensors", weights)
    assert main([*measured(gpt2, "--data", data, "--length", 16), *progress]) == 0
    assert "reused the results" not in capsys.readouterr().err


def test_damaged_lines_are_computed_again(tmp_path: Path) -> None:
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    assert CachedResults(tmp_path, "a model").each(double, [1, 2, 3]) == [2, 4, 6]
    content = (tmp_path / FILE).read_bytes()
    for place in range(len(content)):
        (tmp_path / FILE).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        again = CachedResults(tmp_path, "a model")
        assert again.each(double, [1, 2, 3]) == [2, 4, 6]
        assert again.computed <= 2, "damage reaches two lines at most"
    for cut in range(len(content)):
        (tmp_path / FILE).write_bytes(content[:cut])
        CachedResults(tmp_path, "a model").each(double, [1, 2, 3])
        assert CachedResults(tmp_path, "a model").each(lambda items: [], [1, 2, 3]) == [2, 4, 6]
    assert CachedResults(tmp_path, "another").each(lambda items: [0, 0, 0], [1, 2, 3]) == [0, 0, 0]


def test_progress_without_room_or_folder_is_refused(
    gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = words(tmp_path / "words.txt", 30), tmp_path / "progress"
    command = measured(gpt2, "--data", data, "--length", 16)
    assert main([*command, "--progress", str(data)]) == 2
    refused = capsys.readouterr().err
    assert f"--progress: expected a folder, or the name of a new one, got '{data}', which is a" in refused
    with largest_file(20):
        assert main([*command, "--progress", str(folder)]) == 2
    assert "no space left" in capsys.readouterr().err
    assert main([*command, "--progress", str(folder)]) == 0
    assert main([*command, "--progress", str(folder), "--datastore", "store"]) == 2
    assert "--progress: not available with --datastore" in capsys.readouterr().err
