"""The front page keeps its word: its Python runs, its commands and links exist, the versions agree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import polyformer
from polyformer.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def blocks(language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_its_python_runs(tmp_path: Path):
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-model" / "config.json").is_file()


def test_its_commands_exist():
    lines = [line.split() for code in blocks("sh") for line in code.splitlines()]
    named = {words[1] for words in lines if words[0] == "polyformer"}
    assert len(named) >= 10
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", README))))
def test_its_links_lead_somewhere(link: str):
    assert (ROOT / link).exists()


def test_the_version_stands_in_one_way_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert polyformer.__version__ == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
