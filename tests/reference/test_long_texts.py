"""The families whose long texts differ from transformers' are those that the documentation names."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_table import FAMILIES, TEXTS, language_model, tiny

import polyformer
from polyformer.models.architectures import Transformer

DOCS = Path(__file__).parents[2] / "docs"
LONGER = {"big_bird": 40, "bigbird_pegasus": 40, "reformer": 20}
"""Tokens of the longest text; of other families 18."""
NAMES = {"big_bird": "BigBird", "bigbird_pegasus": "BigBird-Pegasus", "reformer": "Reformer"}
"""As the documentation calls families of which a long text differs."""
FAR = 1e-2
"""Rounding, in float32 here and there, is a thousandth of it."""


def difference(family: str, folder: Path) -> float | None:
    """The largest difference of hidden states in a text as long as the positions; None without texts."""
    task = "Model" if "Model" in FAMILIES[family].tasks else language_model(family)
    theirs: Any = tiny(family, task)
    theirs.save_pretrained(folder)
    ours = polyformer.from_pretrained(folder)
    if not isinstance(ours, Transformer):
        return None
    ids = torch.randint(3, 23, (1, LONGER.get(family, 18)))
    both = {"decoder_input_ids": ids} if theirs.config.is_encoder_decoder else {}
    state = np.random.get_state()  # BigBird's seeds it in every layer
    with torch.no_grad():
        expected = theirs.base_model(input_ids=ids, **both)[0]
        actual = ours(ids, **both).last_hidden_state
    np.random.set_state(state)
    return float((actual - expected).abs().max())


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_the_documentation_names_the_families_whose_long_texts_differ(tmp_path: Path):
    differences = {family: difference(family, tmp_path / family) for family in TEXTS}
    far = {family for family, number in differences.items() if number is not None and number > FAR}
    assert far == NAMES.keys()
    page, models = ((DOCS / name).read_text(encoding="utf-8") for name in ("presets.md", "models.md"))
    (named,) = re.findall(r"Checkpoints of ([^.]*?)\s+compute long texts differently", page)
    assert set(re.split(r"\s+and\s+|,\s+", named)) == {*NAMES.values()}
    assert "(models.md#where-ours-differs)" in page
    section = models.partition("\n## Where ours differs\n")[2].partition("\n## ")[0]
    for name in NAMES.values():
        assert re.search(rf"^- {name}\b", section, re.MULTILINE)
