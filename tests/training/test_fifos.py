"""A FIFO in the place of a file of a run keeps no reader waiting."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import polyformer
from forking import processes
from polyformer.core.errors import InputError
from polyformer.data import load_tokenizer
from polyformer.training.metrics import read_metrics
from polyformer.training.recipes.fit import fit
from polyformer.training.recipes.run import Run
from tiny_recipes import TEXT, tiny_recipe

SECONDS = 120
"""For all readers together, which take a few."""

READERS: dict[str, Callable[[Path], Any]] = {
    "Run.open": lambda run: (Run.open(run).recipe, Run.open(run).facts, Run.open(run).model("cpu")),
    "read_metrics": read_metrics,
    "from_pretrained": polyformer.from_pretrained,
    "load_tokenizer": load_tokenizer,
    "fit": lambda run: fit(Run.open(run).recipe, run, resume=True),
}


def read_all(run: Path, names: list[str], log: Path) -> None:
    """Read copies of the run in every way, with a FIFO for a file; `log` says which the last was."""
    for name in names:
        for way, read in READERS.items():
            log.write_text(f"{way} with {name}")
            copy = Path(shutil.copytree(run, log.with_name("copy")))
            (copy / name).unlink()
            os.mkfifo(copy / name)
            with suppress(InputError):
                read(copy)
            shutil.rmtree(copy)
    log.write_text("all ended")


def test_no_reader_of_a_run_waits_for_a_fifo(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    (tmp_path / "text").write_text(TEXT)
    fit(tiny_recipe(tmp_path / "text", steps=2), run)
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    assert {"checkpoints/step-00000002/state.json", "metrics.jsonl", "recipe.yaml"} <= {*names}
    child = processes.Process(target=read_all, args=(run, names, log))
    child.start()
    child.join(SECONDS)
    child.kill()
    assert log.read_text() == "all ended"
