"""Folders of sentence-transformers: our embeddings are what their modules make of transformers' model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyformer
from polyformer.core.errors import InputError
from polyformer.nn.heads import EmbedConfig

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 9, 4, 8, 7, 3], [6, 2, 9, 0, 0, 0]])
MASK = (IDS > 0).long()
KINDS = ("Transformer", "Pooling", "Normalize")


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(0)
    return (
        transformers.BertModel(
            transformers.BertConfig(
                vocab_size=23,
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=3,
                intermediate_size=20,
                max_position_embeddings=19,
            )
        )
        .double()
        .eval()
    )


def folder_of(model: Any, folder: Path, pooling: object, kinds: tuple[str, ...] = KINDS) -> Path:
    model.save_pretrained(folder)
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


def old_form(mode: str) -> dict[str, Any]:
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    named = {f"pooling_mode_{item}": item == mode for item in modes}
    return {"word_embedding_dimension": 12, **named, "include_prompt": True}


def pooled(hidden: Tensor, how: str) -> Tensor:
    """As sentence-transformers' Pooling, text by text over its real tokens."""
    rows = [row[mask.bool()] for row, mask in zip(hidden, MASK)]
    pools = {
        "mean": lambda row: row.mean(0),
        "cls": lambda row: row[0],
        "max": lambda row: row.amax(0),
        "last": lambda row: row[-1],
    }
    return torch.stack([pools[how](row) for row in rows])


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("pooling", "how"),
    [
        (old_form("mean_tokens"), "mean"),
        (old_form("cls_token"), "cls"),
        (old_form("max_tokens"), "max"),
        (old_form("lasttoken"), "last"),
        ({"pooling_mode": "mean", "embedding_dimension": 12}, "mean"),
    ],
)
@torch.no_grad()
def test_embeddings_are_theirs(theirs: Any, tmp_path: Path, pooling: object, how: str, normalized: bool):
    folder = folder_of(theirs, tmp_path / "model", pooling, KINDS if normalized else KINDS[:2])
    expected = pooled(theirs(IDS, attention_mask=MASK).last_hidden_state, how)
    expected = F.normalize(expected, dim=-1) if normalized else expected
    for head in ("embed", {"kind": "embed"}):
        actual = polyformer.from_pretrained(folder, head)(IDS, MASK).logits
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_head_of_ones_own_is_taken_as_it_is(theirs: Any, tmp_path: Path):
    folder = folder_of(theirs, tmp_path / "model", old_form("mean_tokens"))
    assert polyformer.from_pretrained(folder).config.head == EmbedConfig(
        pooling="first", hidden=True, normalize=False
    )
    for head in (EmbedConfig(pooling="last"), {"kind": "embed", "pooling": "last"}):
        assert polyformer.from_pretrained(folder, head).config.head == EmbedConfig(pooling="last")


@pytest.mark.parametrize(
    ("pooling", "kinds", "said"),
    [
        (old_form("mean_sqrt_len_tokens"), KINDS, "mean_sqrt_len_tokens"),
        ({**old_form("mean_tokens"), "pooling_mode_max_tokens": True}, KINDS, "side by side"),
        ({}, KINDS, "got none"),
        ([1], KINDS, "config.json"),
        (old_form("mean_tokens"), (*KINDS[:2], "Dense", "Normalize"), "got Transformer, Pooling, Dense"),
    ],
)
def test_what_we_do_not_have_is_named(theirs: Any, tmp_path: Path, pooling: object, kinds: Any, said: str):
    folder = folder_of(theirs, tmp_path / "model", pooling, kinds)
    with pytest.raises(InputError, match=said):
        polyformer.from_pretrained(folder, "embed")
    polyformer.from_pretrained(folder)  # the model itself is there


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "..", 3])
def test_a_module_lies_in_the_folder(theirs: Any, tmp_path: Path, path: object):
    folder = folder_of(theirs, tmp_path / "model", old_form("mean_tokens"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match="the name of a folder"):
        polyformer.from_pretrained(folder, "embed")


@pytest.mark.parametrize("linked", ["1_Pooling", "1_Pooling/config.json"])
def test_a_module_is_no_link_to_another_place(theirs: Any, tmp_path: Path, linked: str):
    folder = folder_of(theirs, tmp_path / "model", old_form("mean_tokens"))
    (folder / linked).rename(tmp_path / "private")
    (folder / linked).symlink_to(tmp_path / "private")
    with pytest.raises(InputError, match=r"is a link to a f(older|ile) outside of"):
        polyformer.from_pretrained(folder, "embed")
