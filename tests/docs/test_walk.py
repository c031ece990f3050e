"""The walk in docs/design.md names the files that the calls run through, in this order."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import polyformer
from polyformer.training.loop import Training

PACKAGE = Path(polyformer.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design.md"


def entered(call: Callable[[], object]) -> list[str]:
    """Return the files of the package whose functions a call runs, in the order of their first function.

    Numerical operations (`core/ops`) are left out: which of them run depends on the processor.
    """
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(PACKAGE)):
            files[str(Path(file).relative_to(PACKAGE))] = None

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(previous)
    return [file for file in files if not file.startswith("core/ops/")]


def listed(title: str) -> list[str]:
    """Return the files of the list under a title of the page."""
    (section,) = re.findall(rf"### {re.escape(title)}\n(.*?)(?=\n##)", PAGE.read_text(), flags=re.DOTALL)
    return re.findall(r"^\d+\. `([^`]+)`: .+", section, flags=re.MULTILINE)


def test_a_repeated_call_of_attend_walks_through_the_listed_files():
    q = torch.randn(1, 4, 64, 16)
    attend = polyformer.attend
    call = lambda: attend(q, q, q, pattern="Causal()")  # noqa: E731
    call()
    assert entered(call) == listed("A call of `attend`")


def test_a_forward_pass_walks_through_the_listed_files():
    model, ids = polyformer.create_model("decoder-tiny").eval(), torch.randint(3, 300, (1, 8))
    with torch.no_grad():
        model(ids)
        assert entered(lambda: model(ids)) == listed("A forward pass")


def test_a_step_of_fit_walks_through_the_listed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text.txt").write_text("".join(f"the cat {i} sat on mat {i * 7}.\n" for i in range(600)))
    steps: list[list[str]] = []
    run = Training.step
    step = lambda loop, group: steps.append(entered(lambda: run(loop, group)))  # noqa: E731
    monkeypatch.setattr(Training, "step", step)
    recipe = {
        "data": {"path": str(tmp_path / "text.txt")},
        "tokenizer": {"algorithm": "bpe", "vocab_size": 300},
        "model": {"preset": "decoder-tiny"},
        "task": {"kind": "lm", "row_length": 16, "batch_tokens": 32},
        "training": {"steps": 3, "engine": {"device": "cpu"}},
    }
    polyformer.fit(polyformer.Recipe.from_dict(recipe), out=tmp_path / "run")
    model = listed("A forward pass")
    assert [file for file in steps[1] if file not in model] == listed("A step of `fit`")
