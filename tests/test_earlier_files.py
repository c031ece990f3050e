"""Files of version 0.1.0, from before its packages were moved, can be read: tests/earlier has some."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from polyformer import from_pretrained
from polyformer.core.state_files import load_state
from polyformer.models.transformers import PolyformerConfig
from polyformer.training.recipes import Run, fit

EARLIER = Path(__file__).parent / "earlier"
IDS = torch.arange(5, 13)[None]


def test_a_run_is_read():
    model = Run.open(EARLIER / "run").model("cpu").eval()
    logits = model(IDS).logits
    torch.testing.assert_close(logits.double().sum().item(), -3.46081, rtol=1e-3, atol=1e-3)
    assert torch.equal(from_pretrained(EARLIER / "run").eval()(IDS).logits, logits)


def test_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    recipe = Run.open("run").recipe
    fit(replace(recipe, training=replace(recipe.training, steps=4)), "run", resume=True)
    assert (tmp_path / "run/checkpoints/step-00000004").is_dir()


def test_a_state_is_read():
    model = from_pretrained(EARLIER / "run").eval()
    state = load_state(EARLIER / "state.safetensors")
    after = torch.tensor([[13, 14]])
    expected = model(torch.cat([IDS, after], 1)).logits[:, -2:]
    torch.testing.assert_close(model(after, state=state).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_wrapped_model_is_read(tmp_path: Path):
    folder = shutil.copytree(EARLIER / "wrapped", tmp_path / "wrapped")
    assert PolyformerConfig.from_pretrained(folder).resolve().hidden_size == 16
    code = f"import transformers as t; t.AutoConfig.from_pretrained({str(folder)!r}, trust_remote_code=True)"
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
