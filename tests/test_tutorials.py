"""The tutorials run from their first cell to their last, and what they claim is what they print."""

import re
import sys
from pathlib import Path

import pytest

from forking import run_python
from registered import nightly

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "BOOK", "OUT", "SEEDS"):
        monkeypatch.delenv(name, raising=False)


def printed(name: str, folder: Path, **settings: str) -> str:
    """What the tutorial prints, run with small settings in an empty folder."""
    environment = {"PYTHONPATH": str(ROOT / "src"), **settings}
    words = "-W", "error", ROOT / "docs" / "tutorials" / name
    done = run_python(*words, env=environment, cwd=folder, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_longer_texts(tmp_path: Path):
    text = printed("longer_texts.py", tmp_path, CHAPTERS="16", STEPS="2")
    scores = {name: float(value) for name, value in re.findall(r"^(\w[\w ]*): (0\.\d+|1\.0+)", text, re.M)}
    assert {"cut", "pieces", "converted", "trained"} <= scores.keys()
    assert scores["converted"] > scores["cut"] + 0.2, "what tells the chapters apart stands behind the cut"
    (moved,) = re.findall(r"a short text's vector moves by: (\S+)", text)
    assert float(moved) < 1e-5
    assert "step 2: loss" in text
    read = [int(number) for number in re.findall(r"AutoModel reads (\d+) tokens", text)]
    assert read[0] > 300
    assert (tmp_path / "long-encoder" / "long" / "README.md").is_file()


def test_translator(tmp_path: Path):
    text = printed("translator.py", tmp_path)
    (differs,) = re.findall(r"the equation and attend differ by (\S+)", text)
    assert float(differs) < 1e-13
    (right,) = re.findall(r"right: (\d+) of 200", text)
    assert int(right) > 190, "numbers that it was never shown"
    assert re.search(r"writing '(\w+)' it looks most at '\w+'", text)


def test_own_attention(tmp_path: Path):
    text = printed("own_attention.py", tmp_path)
    (differs,) = re.findall(r"difference from the equation: (\S+)", text)
    assert float(differs) < 1e-13
    share = {name: int(value) for name, value in re.findall(r"^([\w ,]+): (\d+)%", text, re.M)}
    assert share["powers of two"] > 80 > 20 > share["a window of 6"]
    assert min(share["softmax"], share["my_sigmoid"]) > 80
    assert "model: 6 passed, 0 findings" in text
    assert share["pattern, positions and mechanism together"] > 80
    assert share["generated as in the period before"] > 80


@nightly
def test_positions(tmp_path: Path):
    text = printed("positions.py", tmp_path, SEEDS="1")
    shares = {name: int(share) for name, share in re.findall(r"^([\w(=)]+) +(\d+)%", text, re.M)}
    assert shares["sinusoidal"] > 90
    assert max(share for name, share in shares.items() if name != "sinusoidal") < 40


def test_kernels(tmp_path: Path):
    text = printed("kernels.py", tmp_path)
    rows = re.findall(r"^ +(\d+) +[\d.]+ +([\d.]+) +([\d.]+) +[\d.]+$", text, re.M)
    errors = {int(angle): (float(positive), float(trigonometric)) for angle, positive, trigonometric in rows}
    assert errors[0][0] > 1 > errors[0][1], "equal vectors: sines and cosines are exact"
    assert errors[180][0] < 0.01 < errors[180][1], "opposed vectors: positive features are"
    shares = re.findall(r"^ +([\d.]+) +(\d+)%, +(\d+)% +(\d+)%, +(\d+)%$", text, re.M)
    for _, exact, estimate, *topics in shares[1:]:
        assert int(exact) > int(estimate) + 50, "look-ups do not survive"
        assert min(map(int, topics)) > 90, "averages do"


def test_memories(tmp_path: Path):
    text = printed("memories.py", tmp_path)
    known = {int(n): int(share) for n, share in re.findall(r"a memory of +(\d+) tokens: +(\d+)%", text)}
    assert known[24] > 90
    assert known[48] > 90
    assert known[8] < 10
    assert 8 < known[16] < 25
    assert int(re.findall(r"eight pairs: (\d+)%", text)[0]) < 30
    sizes = [line.split()[-3:] for line in text.splitlines() if re.search(r"\d,\d{3}$", line)]
    assert [size[1] == size[2] for size in sizes][:2] == [False, True], "a cache grows, a memory does not"


@nightly
def test_many_machines(tmp_path: Path):
    text = printed("many_machines.py", tmp_path)
    differs = re.findall(r"^(\d+) steps; the losses differ from one process by (\S+)", text, re.M)
    assert [int(steps) for steps, _ in differs] == [12, 40]
    assert max(float(apart) for _, apart in differs) < 1e-5
    (whole,) = re.findall(r"the model has ([\d,]+) weights", text)
    held = [int(number.replace(",", "")) for number in re.findall(r"process \d holds ([\d,]+)", text)]
    assert len(held) == 2
    assert sum(held) == int(whole.replace(",", ""))
    assert "resumed 2 times" in text
    assert re.search(r"sum +│ +60\.\d GB │ +21\.\d GB", text), "as the page says"


def test_what_the_pages_show_is_what_the_tutorials_print():
    sys.path.append(str(ROOT / "docs" / "site"))
    from tutorials import stale

    assert not stale(), "run `make tutorials`"
