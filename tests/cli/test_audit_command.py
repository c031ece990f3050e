"""`polyformer audit`: a run, its files, accepted deviations, the exit status, and bad input."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyformer.applications.audit import CHECKS
from polyformer.applications.audit.architectures import random_model
from polyformer.cli.main import main
from polyformer.models.attached.architectures import ARCHITECTURES


def test_the_command(train_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, out, page = str(train_tiny("lm")), tmp_path / "audit.json", tmp_path / "audit.html"
    accept = tmp_path / "accept.yaml"
    accept.write_text("bfloat16: rounding is coarse\n")
    assert main(["audit", folder, "--accept", str(accept), "--json", str(out), "--page", str(page)]) == 0
    record = json.loads(out.read_text())
    assert [result["check"] for result in record["results"]] == [*CHECKS]
    assert "not applicable" in capsys.readouterr().out
    assert "experts" in page.read_text()
    assert main(["audit", str(tmp_path / "nowhere")]) == 2
    assert main(["audit", folder, "--checks", "biems"]) == 2
    assert "did you mean 'beams'" in capsys.readouterr().err


def test_the_status_is_1_with_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """BART's learned positions count padding; the printed line repeats the finding."""
    (row,) = (row for row in ARCHITECTURES if row.name == "Bart")
    random_model(row).save_pretrained(tmp_path)
    words = ["audit", str(tmp_path), "--checks", "left padding,right padding"]
    assert main(words) == 1
    (line,) = {
        line.strip()
        for line in capsys.readouterr().out.splitlines()
        if "measure(" in line and "target" in line
    }
    scope: dict[str, Any] = {}
    exec(f"import polyformer.applications.audit\ngap = {line}", scope)
    assert scope["gap"].exceeds
    accept = tmp_path / "accept.yaml"
    accept.write_text("left padding: we pad on the right\n")
    assert main([*words, "--accept", str(accept)]) == 0
