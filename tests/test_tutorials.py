"""The tutorials run from their first cell to their last, and what they claim is what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def printed(name: str, folder: Path, **settings: str) -> str:
    """What the tutorial prints, run with small settings in an empty folder."""
    kept = {key: value for key, value in os.environ.items() if key not in ("MODEL", "BOOK")}
    environment = {**kept, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **settings}
    words = [sys.executable, "-W", "error", str(ROOT / "docs" / "tutorials" / name)]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_longer_texts(tmp_path: Path):
    text = printed("longer_texts.py", tmp_path, CHAPTERS="16", STEPS="2")
    scores = {name: float(value) for name, value in re.findall(r"^(\w[\w ]*): (0\.\d+|1\.0+)", text, re.M)}
    assert {"cut", "pieces", "converted", "trained on"} <= scores.keys()
    assert scores["converted"] > scores["cut"] + 0.2, "what tells the chapters apart stands behind the cut"
    (moved,) = re.findall(r"a short text's vector moves by: (\S+)", text)
    assert float(moved) < 1e-5
    assert "step 2: loss" in text
    read = [int(number) for number in re.findall(r"AutoModel reads (\d+) tokens", text)]
    assert read[0] > 300
    assert (tmp_path / "long-encoder" / "long" / "README.md").is_file()
