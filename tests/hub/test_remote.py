"""Folders that `AutoModel` loads in a process in which nobody has imported polyformer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer.hub
from polyformer import create_model

ROOT = Path(__file__).parents[2]

LOAD = """
import sys, torch, transformers
assert "polyformer" not in sys.modules
folder, auto, out = sys.argv[1:]
ids = torch.load(folder + "/ids.pt")
try:
    getattr(transformers, auto).from_pretrained(folder, trust_remote_code=False)
    raise SystemExit("loaded without being asked to")
except ValueError:
    pass
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
assert type(model).__module__.startswith("polyformer.hub."), type(model).__module__
output = model(ids)
torch.save(output[0], folder + "/after.pt")
model.save_pretrained(out)
"""


@pytest.mark.parametrize(
    ("preset", "head", "auto"),
    [
        ("decoder-tiny", None, "AutoModelForCausalLM"),
        ("encoder-tiny", "masked", "AutoModelForMaskedLM"),
        ("encoder-tiny", "embed", "AutoModel"),
    ],
)
def test_a_folder_is_loaded_without_an_import(preset: str, head: str | None, auto: str, tmp_path: Path):
    torch.manual_seed(0)
    options: dict[str, Any] = {} if head is None else {"head": head}
    model = polyformer.hub.wrap(create_model(preset, vocab_size=60, **options).eval())
    model.save_pretrained(tmp_path / "saved")
    ids = torch.randint(3, 60, (2, 9))
    torch.save(ids, tmp_path / "saved" / "ids.pt")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-c", LOAD, str(tmp_path / "saved"), auto, str(tmp_path / "again")]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    after = torch.load(tmp_path / "saved" / "after.pt")
    torch.testing.assert_close(after, model(ids)[0].detach(), rtol=1e-5, atol=1e-6)
    saved = {path.name for path in (tmp_path / "again").iterdir()}
    assert "modeling_polyformer.py" in saved
    assert not saved & {"base.py", "config.py", "writers.py", "tasks.py"}, "no copies of the package's source"
    names = json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"]
    assert names[auto] == f"modeling_polyformer.{type(model).__name__}"
