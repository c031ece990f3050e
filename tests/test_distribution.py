"""What is published: the wheel is the package, the source distribution the repository."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from forking import run_python

ROOT = Path(__file__).parents[1]
BUILT = {
    ".venv",
    ".git",
    "node_modules",
    "__pycache__",
    "runs",
    "build",
    "dist",
    "_build",
    "polyformer.egg-info",
    "polyformer_lab.egg-info",
}
LEFT_OUT = {".ci", ".gitignore"}


def files(folder: Path) -> set[str]:
    """Those of the repository, not what was built from them."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    hidden = (".pytest_cache", ".ruff_cache", ".hypothesis")
    return {str(path) for path in paths if not BUILT & {*path.parts} and path.parts[0] not in hidden}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, in which setuptools may write."""
    target = tmp_path_factory.mktemp("source") / "polyformer"
    return shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(*BUILT, ".*_cache", ".hypothesis"))


def built(kind: str, source: Path, out: Path) -> Path:
    """The distribution that setuptools makes, without a network."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out / done.stdout.split()[-1]


def test_the_wheel_holds_the_package(source: Path, tmp_path: Path):
    with zipfile.ZipFile(built("wheel", source, tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert names == {f"polyformer/{name}" for name in files(ROOT / "src" / "polyformer")}
        (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert "polyformer = polyformer.cli.main:main" in wheel.read(entry).decode()
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
        wheel.extractall(tmp_path / "site")
    # The package runs from the wheel alone.
    code = (
        "import polyformer.cli.main; print(polyformer.__file__); polyformer.cli.main.main(['list', 'rope'])"
    )
    words = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert str(tmp_path / "site") in done.stdout
    assert "rope" in done.stdout


def test_the_wheel_of_the_laboratory_holds_its_claims(source: Path, tmp_path: Path):
    with zipfile.ZipFile(built("wheel", source / "lab", tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
        assert "reproduce = polyformer_lab.commands.reproduce" in wheel.read(entry).decode()
        wheel.extractall(tmp_path / "site")
    claims = {f"polyformer_lab/claims/{name}" for name in files(ROOT / "lab" / "claims")}
    assert names == claims | {f"polyformer_lab/{name}" for name in files(ROOT / "lab" / "polyformer_lab")}
    code = "from polyformer.cli.main import main; main(['reproduce', 'warmup', '--print'])"
    done = run_python("-c", code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")})
    assert "post-norm needs warm-up" in done.stdout, done.stderr[-3000:]


def test_the_source_distribution_holds_the_repository(source: Path, tmp_path: Path):
    with tarfile.open(built("sdist", source, tmp_path)) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    expected = {name for name in files(ROOT) if name.split("/")[0] not in LEFT_OUT}
    assert expected <= names
    assert {name for name in names - expected if ".egg-info/" not in name} <= {"PKG-INFO", "setup.cfg"}
