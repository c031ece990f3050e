"""Signals that ask a run to save: real signals, in processes of their own."""

import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_task import TinyTask, run
from torch import nn

from forking import processes
from polyformer.cli.main import main
from polyformer.training.run_control import Interrupted, SignalRequests, Signals, ignore_sigusr1
from polyformer.training.task import Batch

STEP = 7
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Signalled(TinyTask):
    """Gets signals in the middle of step 7."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers, self.calls = numbers, 0

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        self.calls += 1
        if self.calls == STEP:
            for number in self.numbers:
                signal.raise_signal(number)
        return super().loss(model, batch)


def signalled(out: Path, *numbers: int) -> None:
    torch.set_num_threads(1)
    with (out / "shown").open("w") as shown, redirect_stdout(shown):
        try:
            run(out, task=Signalled(*numbers), keep=9)
        except Interrupted as error:
            sys.exit(128 + error.signal)
        except KeyboardInterrupt:
            sys.exit(99)


def interruptible(target: Any, *arguments: Any) -> None:
    """Calls `target` as a shell's foreground does; one in the background is started with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    target(*arguments)


def exit_code(target: Any, *arguments: Any) -> int:
    process = processes.Process(target=interruptible, args=(target, *arguments))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def steps(out: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").iterdir())


def last(out: Path) -> bytes:
    return (out / "checkpoints/step-00000020/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The final weights of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    assert exit_code(signalled, out) == 0
    return last(out)


@pytest.mark.parametrize("number", CODES)
def test_a_stopping_signal_saves_the_step(number: int, tmp_path: Path, whole: bytes) -> None:
    assert exit_code(signalled, tmp_path, number) == CODES[number]
    assert steps(tmp_path) == [5, STEP]
    run(tmp_path, resume=True)
    assert last(tmp_path) == whole


def test_a_warning_saves_the_step_and_the_run_goes_on(tmp_path: Path, whole: bytes) -> None:
    assert exit_code(signalled, tmp_path, signal.SIGUSR1) == 0
    assert f"step {STEP}: checkpoint written, as a signal asked\n" in (tmp_path / "shown").read_text()
    assert steps(tmp_path) == [5, 10, 15, 20]  # one between is kept until the next
    assert last(tmp_path) == whole


def test_a_warning_and_then_the_end(tmp_path: Path) -> None:
    assert exit_code(signalled, tmp_path, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM) == 143
    assert steps(tmp_path) == [5, STEP]


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    assert exit_code(signalled, tmp_path, signal.SIGINT, signal.SIGINT) == 99
    assert steps(tmp_path) == [5]


def command(out: Path, text: Path, number: int) -> None:
    """`polyformer train`, to which the signal comes as it writes its first row of metrics."""
    left = [number]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[1] == "a" and left:
            signal.raise_signal(left.pop())

    sys.addaudithook(audit)
    torch.set_num_threads(1)
    words = ["--device", "cpu", "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]
    words += ["--task.row_length", "8", "--task.batch_tokens", "8", "--training.reporting.log_every", "1"]
    words += ["--steps", "12"]
    with (out / "error").open("w") as error, redirect_stderr(error), redirect_stdout(error):
        sys.exit(main(["train", "--data", str(text), "--out", str(out / "run"), *words]))


@pytest.mark.parametrize("number", [*CODES, signal.SIGUSR1])
def test_the_command_says_how_to_go_on(number: int, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to read\n" * 50)
    assert exit_code(command, tmp_path, text, number) == CODES.get(number, 0)
    shown = (tmp_path / "error").read_text()
    if number in CODES:
        name = signal.Signals(number).name
        assert shown.endswith(
            f"polyformer: stopped by {name} at step 2, of which a checkpoint is written; "
            f"resume with: polyformer train --resume {tmp_path / 'run'}\n"
        )
        assert steps(tmp_path / "run") == [2]


def test_handlers_of_the_program_stay() -> None:
    heard: list[int] = []
    interrupt = signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGTERM)
            assert signals.take() == SignalRequests()
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is interrupt


def test_a_warning_where_nothing_trains_is_survived() -> None:
    with ignore_sigusr1():
        signal.raise_signal(signal.SIGUSR1)
        with Signals() as signals:
            signal.raise_signal(signal.SIGUSR1)
            assert signals.take() == SignalRequests(save=True)
            assert signals.take() == SignalRequests()
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
