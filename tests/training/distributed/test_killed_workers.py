"""Processes killed as the kernel kills: torchrun starts all again, and the run goes on by itself. One hangs.

One kill here; the environment variable WORKER_KILLS says how many, one in each life of the run.
"""

import os
import random
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from polyformer.cli.main import main
from polyformer.core.files import read_tensors
from polyformer.training.checkpoint import Checkpoints
from polyformer.training.metrics import read_metrics
from polyformer.training.recipes import fit

sys.path.insert(0, str(Path(__file__).parents[2]))
from forking import run_python, start_python
from tiny_recipes import TEXT, tiny_recipe

KILLS = int(os.environ.get("WORKER_KILLS", "1"))
STEPS = 4 * KILLS + 2


def worker(folder: Path) -> None:
    """`polyformer train`, of which in all lives but the last one process is killed."""
    life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if life < KILLS and rank == (life + 1) % 2:
        threading.Thread(target=strike, args=(folder / "run", 4 * life + 2), daemon=True).start()
    sys.exit(main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]))


def strike(run: Path, step: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill this process some time after the checkpoint of `step` is there: while it trains, or writes."""
    while not any(there >= step for there in Checkpoints(run).steps()):
        time.sleep(0.001)
    time.sleep(random.Random(step).uniform(0.0, 0.1) if KILLS > 1 else 0.0)
    os.kill(os.getpid(), how)


def hanging(folder: Path) -> None:
    """`polyformer train` in two processes, of which the second stops in the middle, its connections open."""
    rank = os.environ["RANK"]
    if rank == "1":
        threading.Thread(target=strike, args=(folder / "run", 2, signal.SIGSTOP), daemon=True).start()
    (folder / f"ready-{rank}").touch()  # so that neither waits for the other's start
    while len(list(folder.glob("ready-*"))) < 2:
        time.sleep(0.01)
    sys.exit(main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]))


def test_a_process_that_hangs_ends_the_others_with_an_error_that_says_what_to_do(tmp_path: Path):
    (tmp_path / "text.txt").write_text(TEXT)
    training = {"engine": {"parallel": {"shard": 2}, "timeout": 5.0}}
    recipe = tiny_recipe(tmp_path / "text.txt", 10**6, training=training)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**address, "WORLD_SIZE": "2"}
    workers = [
        start_python(__file__, tmp_path, "hang", env={**environment, "RANK": rank, "LOCAL_RANK": rank})
        for rank in ("0", "1")
    ]
    try:
        said = workers[0].ended(timeout=60).stderr
        assert workers[1].poll() is None
    finally:
        workers[1].kill_all()
    complaint = next(line for line in said.splitlines() if line.startswith("polyformer: error"))
    assert "another process of this run died or did not answer in time (process 0 of 2" in complaint
    for words in ("Timed out waiting 5000ms", "--resume", "training.engine.timeout"):
        assert words in complaint
    assert Checkpoints(tmp_path / "run").latest() is not None


def test_a_run_goes_on_by_itself_after_a_process_was_killed(tmp_path: Path):
    (tmp_path / "text.txt").write_text(TEXT)
    training = {"reporting": {"log_every": 1}, "engine": {"parallel": {"shard": 2}, "timeout": 60.0}}
    exact = {"model": {"dropout": 0.0}}  # processes draw other numbers than one does
    recipe = tiny_recipe(tmp_path / "text.txt", STEPS, training=training, **exact)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", str(KILLS), __file__, tmp_path]
    ended = run_python(*command, timeout=100 * (KILLS + 1))
    complaints = [line for line in ended.stderr.splitlines() if "polyformer: error" in line]
    assert ended.returncode == 0, complaints
    assert ended.stdout.count(f"resumed {tmp_path / 'run'} at step") == KILLS
    accumulated = {"reporting": {"log_every": 1}, "accumulate": 2}
    alone = fit(tiny_recipe(tmp_path / "text.txt", STEPS, training=accumulated, **exact), tmp_path / "alone")
    rows, others = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "alone")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in others], rel=1e-4)
    final, expected = read_tensors(tmp_path / "run" / "model.safetensors"), alone.model.state_dict()
    for name, tensor in final.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    (hanging if sys.argv[2:] == ["hang"] else worker)(Path(sys.argv[1]))
