"""Multiple choice beyond what every family's class computes as transformers' does."""

from pathlib import Path

import pytest
import torch
from families import same
from family_inputs import choices
from family_table import their_model

from polyformer.core.errors import InputError
from polyformer.models import transformers as hub
from polyformer.models.checkpoints import from_transformers
from polyformer.nn.heads import ChooseConfig, ClassifyConfig, TagConfig

transformers = pytest.importorskip("transformers")

TASK = "ForMultipleChoice"


def test_a_choice_without_a_token_is_none():
    theirs = their_model("bert", TASK).eval()
    ours, inputs = from_transformers(theirs), choices(theirs).inputs
    assert ours(**inputs).logits.shape == (2, 3)
    expected = ours(**{name: tensor[1:, :2] for name, tensor in inputs.items()}, labels=torch.tensor([0]))
    inputs["attention_mask"][1, 2] = 0
    actual = ours(**inputs, labels=torch.tensor([-100, 0]))
    assert actual.logits[1, 2] == -torch.inf
    torch.testing.assert_close(actual.loss, expected.loss)
    actual.loss.backward()
    assert all(weight.grad.isfinite().all() for weight in ours.parameters() if weight.grad is not None)


@torch.no_grad()
def test_one_question_is_its_rows_and_vectors_are_its_ids():
    theirs = their_model("bert", TASK).eval()
    ours, inputs = from_transformers(theirs), choices(theirs).inputs
    expected = ours(**inputs).logits
    alone = ours(**{name: tensor[1] for name, tensor in inputs.items()}).logits
    torch.testing.assert_close(alone, expected[1:])
    vectors = {**inputs, "inputs_embeds": ours.tokens(inputs["input_ids"])}
    del vectors["input_ids"]
    torch.testing.assert_close(ours(**vectors).logits, expected)


def test_transformers_loads_what_was_wrapped(tmp_path: Path):
    theirs = their_model("roberta", TASK).eval()
    hub.wrap(from_transformers(theirs)).save_pretrained(tmp_path)
    again = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path)
    case = choices(theirs)
    actual, expected = again(**case.inputs, **case.labels), theirs(**case.inputs, **case.labels)
    same(actual.logits, expected.logits, 1e-5)
    same(actual.loss, expected.loss, 1e-5)
    with pytest.raises(InputError, match=r"input_ids: expected \[batch, choices, length\]"):
        again(case.inputs["input_ids"][0])


def test_a_head_of_a_text_has_one_label():
    with pytest.raises(InputError, match="text: expected the head 'classify' with num_labels=1"):
        ChooseConfig(text=TagConfig())
    with pytest.raises(InputError, match="got 3 labels"):
        ChooseConfig(text=ClassifyConfig(num_labels=3))
