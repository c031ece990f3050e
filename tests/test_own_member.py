"""A package of somebody else (examples/own-member), installed: its members are found and tested."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from forking import run_python
from registered import nightly

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "own-member"

USE = """
import sys
import torch, polyformer

assert "own_member" not in sys.modules, "installed members are not loaded by the import"
ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
for number, parts in enumerate([
    {"position": "kerple"},
    {"position": "kerple(variant='power')"},
    {"attention": "LogSparse(16) | Global(1)"},
    {"attention": "nystrom(landmarks=4)"},
    {"feedforward": "maxout(intermediate_size=64, pieces=3)"},
]):
    model = polyformer.create_model("encoder-tiny", head="masked", **parts).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model(ids, labels=ids).loss
    before.backward()
    optimizer.step()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    model.eval().save_pretrained(f"saved-{number}")
    torch.save((ids, model(ids).logits), f"saved-{number}/logits.pt")
assert "own_member" in sys.modules
"""

LIST_AND_LOAD = """
import torch, polyformer
from polyformer.cli.main import main

assert main(["list"]) == 0  # before any member is asked for by its name
for number in range(5):
    ids, logits = torch.load(f"saved-{number}/logits.pt")
    assert torch.equal(polyformer.from_pretrained(f"saved-{number}")(ids).logits, logits)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the package is installed, by pip and without a network."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "own-member")  # pip builds inside
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index")
    run("-m", "pip", "install", *flags, "--target", str(folder), str(source))
    return folder


def run(
    *words: str, site: Path | None = None, folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    path = [str(ROOT / "src"), *([str(site)] if site else [])]
    whole = {"NIGHT": "", "DAY": ""}  # a night runs a part of the suite, this one all that it names
    env = {"PYTHONPATH": os.pathsep.join(path), **whole}
    done = run_python(*words, cwd=folder or ROOT, env=env, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def test_installed_members_are_listed_trained_saved_and_loaded(site: Path, tmp_path: Path):
    run("-c", USE, site=site, folder=tmp_path)
    listed = run("-c", LIST_AND_LOAD, site=site, folder=tmp_path).stdout
    for axis, name in (
        ("Position", "kerple"),
        ("Pattern", "LogSparse"),
        ("Mechanism", "nystrom"),
        ("FeedForward", "maxout"),
    ):
        assert any(line.split()[:2] == [axis, name] for line in listed.splitlines())
    shown = run("-m", "polyformer", "show", "pattern", "LogSparse(8)", site=site, folder=tmp_path)
    assert "%" in shown.stdout or shown.stdout.count("\n") > 8


CONTRACTS = [
    f"tests/contracts/test_{name}.py" for name in ("k2_masking", "k5_state", "k7_layout", "k10_saving")
]
"""Of every day: the masking, the state, the layout, saving."""


def passed(members: str, contracts: list[str], site: Path) -> int:
    """The number of contracts of these members that pass; none fails."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", members, *contracts)
    loaded = "ignore::pytest.PytestAssertRewriteWarning"  # the server has loaded some plugins
    printed = run(*words, "-o", "addopts=", "-W", loaded, site=site).stdout
    (number,) = re.findall(r"(\d+) passed", printed)
    return int(number)


def test_installed_members_keep_the_contracts(site: Path):
    """The contracts of every member run over them too."""
    assert passed("kerple or LogSparse or nystrom or maxout", CONTRACTS, site) > 30


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    """A folder with the mechanism of the guide, a single file, as an installed package."""
    shutil.copy(ROOT / "examples" / "own_mechanism.py", tmp_path)
    information = tmp_path / "own_mechanism-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-mechanism\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[polyformer.members]\nown-mechanism = own_mechanism\n")
    return tmp_path


def test_the_mechanism_of_the_guide_keeps_the_contracts(guide: Path):
    assert passed("my_sigmoid", CONTRACTS, guide) > 30


@nightly
def test_the_mechanism_of_the_guide_keeps_every_contract(guide: Path):
    assert passed("my_sigmoid", ["tests/contracts"], guide) > 120


def test_a_broken_package_is_named_and_breaks_nothing(tmp_path: Path):
    (tmp_path / "broken_members.py").write_text("raise RuntimeError('out of order')")
    information = tmp_path / "broken_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[polyformer.members]\nbroken = broken_members\n")
    code = """
import polyformer
print(polyformer.create_model("encoder-tiny", position="rope").config.encoder.position)
print(len(polyformer.list_models()))
"""
    done = run("-W", "always", "-c", code, site=tmp_path)
    assert "RopeConfig" in done.stdout
    assert (
        done.stderr.count("the installed package broken-package are left out: importing broken_members") == 1
    )
    assert "RuntimeError: out of order" in done.stderr
