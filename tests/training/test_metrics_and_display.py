"""The record of a run, and what is shown of it."""

import csv
import io
import json
import os
import pty
from pathlib import Path

import pytest
from tiny_task import run

from polyformer.core.errors import InputError
from polyformer.training.metrics import (
    Display,
    LineDisplay,
    LiveDisplay,
    MetricsLog,
    duration,
    open_display,
    panel_names,
    plot_curves,
    read_metrics,
    series,
    summary,
)


def table(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_columns_may_come_later(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write(1, {"loss": 2.5})
    log.write(2, {"loss": 2.25, "valid_loss": 3.0})
    log.write(3, {"loss": float("nan")})
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.25, "valid_loss": 3.0},
        {"step": 3, "loss": None},
    ]
    assert table(tmp_path) == [
        {"step": "1", "loss": "2.5", "valid_loss": ""},
        {"step": "2", "loss": "2.25", "valid_loss": "3.0"},
        {"step": "3", "loss": "", "valid_loss": ""},
    ]


def test_going_on_drops_the_rows_that_will_come_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 6):
        log.write(step, {"loss": 1.0 / step, "seconds": 10.0 * step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed here
    log = MetricsLog(tmp_path, 3)
    assert log.seconds == 30.0
    log.write(4, {"loss": 9.0, "seconds": 31.0})
    log.sync()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [row["loss"] for row in table(tmp_path)][-1] == "9.0"
    assert MetricsLog(tmp_path, 0).seconds == 0.0
    assert read_metrics(tmp_path) == []


def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write(1, {"loss": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    os.symlink("/dev/full", tmp_path / "metrics.jsonl")
    with pytest.raises(InputError, match=r"cannot write .*metrics.jsonl: no space left"):
        log.write(2, {"loss": 1.0})


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    display = open_display(100, 0, active=True, stream=stream)
    assert isinstance(display, LineDisplay)
    values = {"epoch": 1, "loss": 2.34567, "tokens_per_s": 12345.6, "seconds": 3.0, "valid_loss": 3.14159}
    with display:
        display.report(20, values, left=3725.0)
        display.note("resumed")
    line = "step 20/100  loss 2.3457  12,346 tokens/s  valid loss 3.142  1:02:05 left"
    assert stream.getvalue().splitlines() == [line, "resumed"]
    assert type(open_display(100, 0, active=False, stream=stream)) is Display
    assert summary({"loss": 2.0, "images_per_s": 900.4}) == "loss 2.0000  900 images/s"


def read_to_end(terminal: int) -> str:
    """Everything that was written to a terminal which its writers have closed; it comes in pieces."""
    pieces = []
    with open(terminal, "rb", buffering=0) as stream:
        while True:
            try:
                piece = stream.read(100_000)
            except OSError:  # Linux says so once all is read and nobody can write any more
                break
            if not piece:
                break
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real terminal, of which the test holds the other end."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        display = open_display(40, 10, active=True, stream=terminal)
        assert isinstance(display, LiveDisplay)
        with display:
            display.report(20, {"loss": 2.5, "tokens_per_s": 900.0, "valid_loss": 1.25}, left=61.0)
            display.report(30, {"loss": 2.0, "tokens_per_s": 900.0}, left=30.0)
    shown = read_to_end(ours)
    assert "step 20  valid loss 1.25" in shown
    assert "30/40" in shown
    assert "loss 2.0000  900 tokens/s  valid loss 1.25  0:30 left" in shown


def test_text_of_numbers() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.6, 3600.0)] == ["0:00", "1:00", "1:00:00"]
    values = {"valid_loss": 2.0, "valid_token_accuracy": 0.51239, "epoch": 3}
    assert summary(values) == "valid loss 2  valid token accuracy 0.5124"


def test_curves_have_a_panel_for_each_kind_of_number(tmp_path: Path) -> None:
    run(tmp_path, steps=10)
    rows = read_metrics(tmp_path)
    assert panel_names(rows) == {
        "loss": ["loss", "valid_loss"],
        "learning rate": ["lr"],
        "worst": ["valid_worst"],
    }
    assert series(rows, "valid_worst") == ([10], [rows[-1]["valid_worst"]])
    path = plot_curves(tmp_path, tmp_path / "picture.svg")
    text = path.read_text()
    assert text.startswith("<?xml")
    assert "<svg" in text


@pytest.mark.parametrize("value", [{"a": 0}, [1], "1", True])
def test_a_row_of_other_values_than_numbers_is_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "lr": value}) + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1: expected a row of numbers with its step"):
        read_metrics(tmp_path)
