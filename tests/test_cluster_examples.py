"""The files of examples/cluster: what they start is what the command line takes."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from polyformer.training.config import EngineConfig, ParallelConfig

FOLDER = Path(__file__).parents[1] / "examples" / "cluster"
SETTING = re.compile(r"--training\.engine\.([\w.]+)[= ](\S+)")


def started(name: str) -> str:
    """What a file starts, as words."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    if name.endswith(".sbatch"):
        return text.replace("\\\n", " ")
    documents = [document for document in yaml.safe_load_all(text) if document]
    spec = documents[-1]["spec"]
    template = spec.get("template") or spec["pytorchReplicaSpecs"]["Worker"]["template"]
    (container,) = template["spec"]["containers"]
    return " ".join([*container["command"], *container["args"]])


@pytest.mark.parametrize("name", ["slurm.sbatch", "kubernetes-job.yaml", "pytorchjob.yaml"])
def test_the_options_are_those_of_the_engine(name: str) -> None:
    words = started(name).replace('"$SLURM_NNODES"', "4")
    settings = {key: yaml.safe_load(value) for key, value in SETTING.findall(words)}
    mesh = {key.removeprefix("parallel."): settings.pop(key) for key in list(settings) if "parallel" in key}
    engine = EngineConfig.from_dict({**settings, "parallel": mesh})
    assert (engine.precision, engine.recompute) == ("bf16", True)
    assert engine.parallel == ParallelConfig(data=4, shard=8)
    assert engine.parallel.sizes(4 * 8)["shard"] == 8, "4 machines of 8"
    assert "--shutdown-timeout" in words
    assert "train-or-resume.sh" in words


def test_accelerate_reads_its_file() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(FOLDER / "accelerate.yaml"))
    assert (config.num_processes, config.mixed_precision) == (8, "no")


def test_a_run_is_begun_and_gone_on_with(tmp_path: Path) -> None:
    """With an `echo` in the place of polyformer."""
    (tmp_path / "polyformer").symlink_to(shutil.which("echo") or "/bin/echo")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def said() -> str:
        words = [FOLDER / "train-or-resume.sh", "recipe.yaml", tmp_path / "run", "--training.steps", "3"]
        return subprocess.run(
            words, env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert said() == f"train recipe.yaml --out {tmp_path}/run --training.steps 3"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    assert said() == f"train --resume {tmp_path}/run"


def test_the_scripts_are_scripts() -> None:
    for name in ("slurm.sbatch", "train-or-resume.sh"):
        subprocess.run(["bash", "-n", FOLDER / name], check=True)
