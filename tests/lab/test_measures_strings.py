"""The Universal Transformer and those that it is compared with."""

import dataclasses
from pathlib import Path

import torch

from polyformer.core.sequence.tokens import Tokens
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.measures.strings import writer_of
from polyformer_lab.study import Study


def test_the_models_are_equal_in_what_their_names_say(tmp_path: Path):
    cells = cells_of(Study.load("universal"), tmp_path, Sources({}, None, {}))[:4]
    universal, narrow, wide, placed = (
        sum(p.numel() for p in writer_of(cell.options["model"]).parameters()) for cell in cells
    )
    assert abs(narrow / universal - 1) < 0.05
    assert wide == placed > 3 * universal


def test_source_and_target_begin_at_the_given_position():
    torch.manual_seed(0)
    options = {
        "preset": "transformer-tiny",
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
    }
    model = writer_of({**options, "position": "sinusoidal", "label_smoothing": 0.0}).eval()
    ids = torch.randint(4, 14, (2, 5))
    at = [model(ids, ids, torch.tensor(start)).logits for start in (0, 7)]
    torch.testing.assert_close(at[0], model.model(ids, labels=ids).logits)
    target = model.model.shifted_right(ids, None)
    for source_from, target_from in ((0, 7), (7, 0), (7, 7)):
        state = model.model.encode(ids, position_ids=torch.arange(source_from, source_from + 5))
        state = dataclasses.replace(state, tokens=Tokens(0, dropped=target_from))
        logits = model.model(decoder_input_ids=target, state=state).logits
        assert torch.allclose(logits, at[1]) == (source_from == target_from)
