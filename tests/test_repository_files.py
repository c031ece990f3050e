"""Files that services read: workflows, forms, hooks, the image, the conda recipe; tutorials as notebooks."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from registered import nightly

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "site"))

import notebooks  # noqa: E402 - a module of the site

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def steps(path: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def schema(name: str, *files: Path) -> None:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{name}", *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_workflows_and_forms_have_the_form_that_github_reads():
    schema("github-workflows", *WORKFLOWS)
    schema("github-issue-forms", *(form for form in FORMS if form.name != "config.yml"))
    schema("github-issue-config", ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists(path: Path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(path):
        for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
            assert target in targets
        for place in re.findall(r"\btests/[\w/]+", step.get("run", "")):
            assert (ROOT / place).exists()
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v1)", step["uses"])


def test_every_python_that_the_package_names_is_tested():
    (check,) = [path for path in WORKFLOWS if path.stem == "check"]
    tested = yaml.safe_load(check.read_text())["jobs"]["linux"]["strategy"]["matrix"]["python"]
    named = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert tested == named


def test_hooks_are_the_quick_part_of_make_check():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    for hook in hooks:
        command = hook["entry"].replace(".venv/bin/python", "").strip()
        assert command in makefile, hook["id"]


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def test_the_image_runs_as_a_user_without_privileges():
    lines = instructions((ROOT / "Dockerfile").read_text())
    words = [word for word, _ in lines]
    assert words[:2] == ["ARG", "FROM"]
    assert set(words) <= {
        "ARG",
        "FROM",
        "ENV",
        "COPY",
        "RUN",
        "USER",
        "WORKDIR",
        "EXPOSE",
        "ENTRYPOINT",
        "CMD",
    }
    assert dict(lines)["USER"] == "user"
    assert words.index("USER") > max(place for place, word in enumerate(words) if word in ("RUN", "COPY"))
    assert dict(lines)["ENTRYPOINT"] == '["polyformer"]'
    base = next(rest for word, rest in lines if rest.startswith("BASE="))
    assert re.fullmatch(r"BASE=python:3\.\d+-slim", base), "a base without a version changes by itself"
    extras = re.search(r"EXTRAS=([\w,]+)", (ROOT / "Dockerfile").read_text())
    assert extras is not None
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def has_builder() -> bool:
    docker = shutil.which("docker")
    return docker is not None and subprocess.run([docker, "info"], capture_output=True).returncode == 0


@nightly
@pytest.mark.skipif(not has_builder(), reason="no docker daemon runs; the image is only checked line by line")
def test_the_image_is_built_and_runs():
    tag = "polyformer-test"
    subprocess.run(["docker", "build", "--tag", tag, str(ROOT)], check=True)
    done = subprocess.run(["docker", "run", "--rm", tag, "--version"], capture_output=True, text=True)
    assert done.stdout.startswith(f"polyformer {PROJECT['version']}")


def test_the_conda_recipe_has_the_requirements_of_the_package():
    recipe = yaml.safe_load((ROOT / "conda" / "meta.yaml").read_text())
    assert recipe["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    python, *others = (line.replace(" ", "") for line in recipe["requirements"]["run"])
    assert python == f"python{PROJECT['requires-python']}"
    expected = [re.sub(r"^torch\b", "pytorch", line).lower() for line in PROJECT["dependencies"]]
    assert others == expected


@pytest.mark.parametrize("name", notebooks.names())
def test_a_tutorial_is_a_notebook_with_its_output(name: str):
    document = nbformat.reads(notebooks.notebook(name), 4)
    code = [cell for cell in document.cells if cell.cell_type == "code"]
    assert code[0].source == notebooks.INSTALL
    assert any(cell.outputs for cell in code)


@nightly
@pytest.mark.parametrize("name", ["kernels", "positions"])
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path):
    document = nbformat.reads(notebooks.notebook(name), 4)
    recorded = [[output.text for output in cell.get("outputs", ())] for cell in document.cells[1:]]
    document.cells = document.cells[1:]  # without the installation
    NotebookClient(document, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    again = [
        [output.text for output in cell.get("outputs", ()) if output.output_type == "stream"]
        for cell in document.cells
    ]
    # Numbers of trained models differ from machine to machine; the lines do not.
    lines = [[len("".join(texts).splitlines()) for texts in outputs] for outputs in (recorded, again)]
    assert lines[0] == lines[1]
