"""Registries: names once, wildcards, nearest names; users' members, loaded in another process."""

from pathlib import Path

import pytest

from forking import run_python
from polyformer.core.errors import InputError
from polyformer.core.registry import Registry
from polyformer.models.presets import create_model


def fruits() -> Registry[int]:
    registry: Registry[int] = Registry("fruit")
    for number, name in enumerate(["pear", "apple", "apricot"]):
        registry.register(name)(number)
    return registry


def test_things_are_found_by_name_in_the_order_they_came():
    assert fruits()["apple"] == 1
    assert list(fruits()) == ["pear", "apple", "apricot"]


def test_wildcards_are_sorted():
    assert fruits().names("ap*") == ["apple", "apricot"]
    assert fruits().names() == ["apple", "apricot", "pear"]
    assert fruits().names("z*") == []


def test_an_unknown_name_comes_with_the_nearest():
    with pytest.raises(InputError, match="unknown fruit 'aple': did you mean 'apple'"):
        fruits()["aple"]


@pytest.mark.parametrize(
    ("name", "part", "member"),
    [
        ("svd", "attention", "svd"),
        ("lsh", "attention", "lsh"),
        ("DeBERTa", "position", "deberta"),
        ("SortCut", "attention", "sort_cut"),
    ],
)
def test_a_member_where_a_model_is_expected_is_explained(name: str, part: str, member: str):
    way = f'--model.{part} {member} or create_model(..., {part}="{member}")'
    with pytest.raises(InputError) as caught:
        create_model(name)
    assert way in str(caught.value)
    create_model("encoder-tiny" if part == "attention" else "decoder-tiny", **{part: member})


def test_suggestions_are_of_all_kinds(complaint):
    assert "it is a recipe (polyformer train longformer); did you mean 'longformer-base'" in complaint(
        "show", "longformer"
    )
    assert 'it is a model (create_model("gpt2"))' in complaint("train", "gpt2")
    assert "'sort_cut' (an attention member: --model.attention sort_cut" in complaint("show", "sort_cutt")
    assert "did you mean 'roformer'" in complaint("list", "roformr")


def test_a_name_is_taken_once():
    registry = fruits()
    with pytest.raises(InputError, match="fruit 'pear' is registered already"):
        registry.register("pear")
    assert registry["pear"] == 0


MEMBERS = '''
import dataclasses
from typing import ClassVar

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Pattern


@dataclasses.dataclass(frozen=True)
class Backwards(Pattern):
    """No more than `tokens` tokens back: neither a source nor anything else is declared."""

    tokens: int = 2

    def allows(self, context, b, h, q_idx, kv_idx):
        distance = context.distance(q_idx, kv_idx)
        return (distance >= 0) & (distance <= self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(SoftmaxConfig):
    kind: ClassVar[str] = "plain"
'''

SAVE = """
import sys
import torch, polyformer
from polyformer.models.plugins import import_named

import_named("members_of_users.py")
for number, attention in enumerate(sys.argv[1:]):
    model = polyformer.create_model("decoder-tiny", attention=attention).eval()
    model.save_pretrained(f"saved-{number}")
    torch.save(model(torch.arange(9)[None]).logits, f"saved-{number}/logits.pt")
"""

LOAD = """
import glob
import torch, polyformer
import members_of_users

for saved in glob.glob("saved-*"):
    model = polyformer.from_pretrained(saved)
    assert torch.equal(model(torch.arange(9)[None]).logits, torch.load(f"{saved}/logits.pt"))
"""


def run(*words: str, folder: Path) -> str:
    done = run_python(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


ATTENTION = ["Backwards(3)", "Backwards(1) | Global(1)", "plain", "plain(pattern=Backwards(2))"]


def test_they_are_saved_and_loaded_in_another_process(tmp_path: Path):
    (tmp_path / "members_of_users.py").write_text(MEMBERS)
    run("-c", SAVE, *ATTENTION, folder=tmp_path)
    run("-c", LOAD, folder=tmp_path)
    words = ("-m", "polyformer", "show", "saved-0", "--import", "members_of_users.py")
    assert run(*words, folder=tmp_path).startswith("saved-0: ")
