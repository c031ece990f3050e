"""A refusal names what works, and what it names does work."""

import re

import pytest
import torch

from polyformer import InputError, create_model
from polyformer.attention.mechanisms.base import MechanismConfig

UNRELATED = sorted(
    kind for kind, mechanism in MechanismConfig.kinds.items() if not mechanism.supports_score_bias
)


@pytest.mark.parametrize("kind", UNRELATED)
def test_positions_that_a_refusal_names_work(kind: str):
    preset = "decoder-tiny" if MechanismConfig.kinds[kind].causal else "encoder-tiny"
    mechanism = MechanismConfig.kinds[kind].examples()[0]
    with pytest.raises(
        InputError, match=r"cannot use a position scheme that changes the scores.*; .*or choose a position"
    ) as no:
        create_model(preset, mechanism=mechanism, position="alibi")
    named = re.findall(r"'(\w+)'", str(no.value).partition("or choose a position")[2])
    assert len(named) >= 3
    for position in named:
        model = create_model(preset, mechanism=mechanism, position=position).eval()
        assert model(torch.zeros(1, 8, dtype=torch.long)).logits.isfinite().all()


def test_packing_that_a_mechanism_cannot_do_says_how_to_do_without():
    model = create_model("encoder-tiny", mechanism="linformer(k=4, max_length=16)")
    ids = torch.zeros(1, 8, dtype=torch.long)
    with pytest.raises(InputError, match=r"'linformer' cannot separate documents .*--task\.packed false"):
        model(ids, document_ids=ids)


def test_a_block_that_widens_names_the_table_it_needs():
    join = "reversible(join=concat)"
    with pytest.raises(InputError, match=r"needs token vectors of hidden_size 256.*tied=False"):
        create_model("decoder-tiny", block=join)
    model = create_model("decoder-tiny", block=join, tied=False)
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, 512)
