"""What an encoder-decoder does beyond one pass, compared with transformers: caches, generation, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Inputs, same
from torch import Tensor

import polyformer
from polyformer.core.errors import InputError
from polyformer.model import Transformer

WRITTEN = torch.tensor([[4, 7, 12, 5, 28, 9], [3, 3, 21, 8, 5, 6], [28, 7, 19, 4, 9, 6]])
"""Inputs of a decoder."""

GOALS = torch.tensor([[5, 7, -100, 28, 9, 1], [22, 3, 8, 8, -100, 4], [0, 17, 3, 3, 5, 5]])
"""Labels of the same length."""


def loaded(theirs: Any, folder: Path) -> Transformer:
    """Our model of the files that transformers saves."""
    theirs.save_pretrained(folder)
    return polyformer.from_pretrained(folder)


@torch.no_grad()
def verify_steps(ours: Transformer, inputs: Inputs, theirs: Any, their_inputs: Inputs) -> None:
    """Chunks of several sizes with a cache are one pass of theirs."""
    ids = torch.randint(3, 29, (3, 9))
    whole = theirs(**their_inputs, decoder_input_ids=ids, use_cache=False).logits
    state, logits = ours.encode(inputs["input_ids"], inputs["attention_mask"]), []
    for chunk in ids.split([1, 3, 1, 4], 1):
        output = ours(decoder_input_ids=chunk, state=state)
        state = output.state
        logits.append(output.logits)
    same(torch.cat(logits, 1), whole)


def same_texts(actual: Tensor, expected: Tensor, eos: int) -> None:
    """Generated texts up to their ends; theirs begin with the start token."""
    assert expected.shape[1] > 4
    for mine, other in zip(actual, expected[:, 1:]):
        end = (other == eos).nonzero().flatten().tolist()
        length = end[0] + 1 if end else len(other)
        assert mine[:length].tolist() == other[:length].tolist()


def verify_refusal(theirs: Any, folder: Path, options: dict[str, Any], message: str, *without: str) -> None:
    """A saved model with other `options` in its configuration is refused with this message."""
    theirs.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in saved.items() if name not in without}
    (folder / "config.json").write_text(json.dumps({**kept, **options}))
    with pytest.raises(InputError, match=re.escape(message)):
        polyformer.from_pretrained(folder)
