"""The page on an own mechanism: its code is the example's, and runs."""

import re
from pathlib import Path

from forking import run_python

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_mechanism.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_of_the_page_runs(tmp_path: Path):
    done = run_python("-W", "error", "-c", "\n".join(CODE), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_code_of_the_page_is_the_example():
    example = (ROOT / "examples" / "own_mechanism.py").read_text(encoding="utf-8")
    assert CODE[0].strip() in example
    lines = [line for line in CODE[0].splitlines() if line.strip() and '"""' not in line]
    assert len(lines) <= 16, "the page promises few lines"
