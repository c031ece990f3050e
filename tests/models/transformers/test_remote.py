"""Folders that `AutoModel` loads in a process in which nobody has imported polyformer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import polyformer.models.transformers
from polyformer import create_model

ROOT = Path(__file__).parents[3]

LOAD = """
import os, sys, torch, transformers
assert "polyformer" not in sys.modules
ids = torch.load("ids.pt")
for auto in sys.argv[1:]:
    process = os.fork()  # each loads its folder as the first
    if process:
        if os.waitpid(process, 0)[1]:
            raise SystemExit(f"{auto} did not load its folder")
        continue
    try:
        getattr(transformers, auto).from_pretrained(auto, trust_remote_code=False)
        raise SystemExit("loaded without being asked to")
    except ValueError:
        pass
    model = getattr(transformers, auto).from_pretrained(auto, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("polyformer.models.transformers."), type(model).__module__
    torch.save(model(ids)[0], auto + "/after.pt")
    model.save_pretrained(auto + "/again")
    os._exit(0)
"""
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AutoModelForCausalLM": ("decoder-tiny", {}),
    "AutoModelForMaskedLM": ("encoder-tiny", {"head": "masked"}),
    "AutoModel": ("encoder-tiny", {"head": "embed"}),
}


def test_folders_are_loaded_without_an_import(tmp_path: Path):
    torch.manual_seed(0)
    ids, models = torch.randint(3, 60, (2, 9)), {}
    torch.save(ids, tmp_path / "ids.pt")
    for auto, (preset, options) in FOLDERS.items():
        models[auto] = polyformer.models.transformers.wrap(
            create_model(preset, vocab_size=60, **options).eval()
        )
        models[auto].save_pretrained(tmp_path / auto)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-c", LOAD, *FOLDERS]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for auto, model in models.items():
        after = torch.load(tmp_path / auto / "after.pt")
        torch.testing.assert_close(after, model(ids)[0].detach(), rtol=1e-5, atol=1e-6)
        again = tmp_path / auto / "again"
        saved = {path.name for path in again.iterdir()}
        assert "modeling_polyformer.py" in saved
        copies = {"base.py", "config.py", "writers.py", "tasks.py"}
        assert not saved & copies, "no copies of the package's source"
        names = json.loads((again / "config.json").read_text())["auto_map"]
        assert names[auto] == f"modeling_polyformer.{type(model).__name__}"
