"""A user's own members: registered by their definition alone, saved, and loaded in another process."""

from pathlib import Path

from forking import run_python

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
