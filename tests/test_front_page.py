"""The front page keeps its word: its Python runs, its commands and links exist, the versions agree."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import polyformer
from forking import run_python
from polyformer.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def blocks(language: str) -> list[str]:
    """The fenced code of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_its_python_runs(tmp_path: Path):
    code, _, _ = blocks("python")
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-model" / "config.json").is_file()


def test_its_trained_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, code, _ = blocks("python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reviews.csv").write_text("text,label\n" + "good film,pos\nbad film,neg\n" * 10)
    (tmp_path / "review.txt").write_text("a good film\n")
    words = "train --data reviews.csv --out runs/reviews-1 --model encoder-tiny --steps 1 --device cpu"
    assert main([*words.split(), "--tokenizer.algorithm", "bytes", "--model.hidden_size", "16"]) == 0
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    can, first, *others = done.stdout.splitlines()
    assert can == "('predict', 'classify', 'embed') ('neg', 'pos')"
    assert first.split()[0] in ("neg", "pos")
    assert len(others) == 2


def test_its_program_is_the_example():
    """test_examples.py runs it."""
    _, _, code = blocks("python")
    assert code == (ROOT / "examples" / "own_data.py").read_text(encoding="utf-8")
    assert len([line for line in code.splitlines() if line]) <= 20


def test_its_commands_exist():
    lines = [line.split() for code in blocks("sh") for line in code.splitlines()]
    named = {words[1] for words in lines if words[0] == "polyformer"}
    assert len(named) >= 10
    assert named <= set(COMMANDS)


def test_its_links_lead_somewhere():
    links = set(re.findall(r"\]\(([^)#]+)", README))
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_version_stands_in_one_way_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert polyformer.__version__ == PROJECT["version"] == citation["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]
