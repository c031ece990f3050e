"""The settings that a checkpoint came with are those that `generate` follows when it is given none."""

import json
from pathlib import Path

import pytest
import torch

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.generation import GenerationConfig
from polyformer.models.presets import create_model

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 40,
}


def checkpoint(folder: Path, form: str, **settings: object) -> Path:
    torch.manual_seed(0)
    create_model("gpt2", **SIZES).save_pretrained(folder, format=form)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("form", ["hub", "polyformer"])
def test_settings_are_read_followed_and_kept(form: str, tmp_path: Path):
    model = polyformer.from_pretrained(checkpoint(tmp_path, form, max_new_tokens=7, num_beams=3))
    ids = torch.randint(50, (2, 4))
    assert model.generate(ids).sequences.shape == (2, 11)
    assert model.generate(ids, config=GenerationConfig(max_new_tokens=3)).sequences.shape == (2, 7)
    for other in ("hub", "polyformer"):
        model.save_pretrained(tmp_path / other, format=other)
        again = polyformer.from_pretrained(tmp_path / other)
        assert torch.equal(again.generate(ids).sequences, model.generate(ids).sequences)


def test_what_is_not_there_is_refused_when_it_is_needed(tmp_path: Path):
    model = polyformer.from_pretrained(checkpoint(tmp_path, "hub", guidance_scale=1.5))
    with pytest.raises(InputError, match="guidance_scale"):
        model.generate(torch.randint(50, (1, 4)))
    assert model.generate(torch.randint(50, (1, 4)), config=GenerationConfig(max_new_tokens=2))
