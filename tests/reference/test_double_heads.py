"""GPT's and GPT-2's class with two heads in transformers and ours: next tokens, and one of several texts."""

import copy
from pathlib import Path

import pytest
import torch
from families import back, compare_gradients, counted, loaded, same, shaken, texts
from family_table import their_model

import polyformer
from pairwise import pairwise
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.models import transformers as hub
from polyformer.models.checkpoints import from_transformers

NAMES = ["gpt2", "openai-gpt"]
TASK = "DoubleHeadsModel"
ANSWERS = torch.tensor([2, 0])


def questions(side: str = "right") -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Two questions of three choices each, of different lengths; labels of tokens; a place in every text."""
    inputs = texts(23, (11, 8, 7, 9, 11, 10), side=side)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    labels = ids.masked_fill(~mask | ~(mask & (mask.cumsum(1) > 1)), IGNORED)
    places = torch.where(mask, torch.arange(ids.shape[1]), -1).topk(3, 1).values[:, 2]
    return {name: x.unflatten(0, (2, 3)) for name, x in inputs.items()}, labels, places.view(2, 3)


@pytest.mark.parametrize(("name", "tied", "side"), pairwise(NAMES, [True, False], ["left", "right"]))
def test_double_heads(name: str, tied: bool, side: str, tmp_path: Path):
    theirs = shaken(their_model(name, TASK, tie_word_embeddings=tied))
    ours = loaded(theirs, tmp_path / "theirs")
    inputs, labels, places = questions(side)
    mask = inputs["attention_mask"].flatten(0, 1)
    mine = ours(
        **inputs,
        labels=labels.unflatten(0, (2, 3)),
        sentence_labels=ANSWERS,
        score_positions=places,
        output_hidden_states=True,
    )
    other = theirs(
        inputs["input_ids"],
        attention_mask=mask,
        position_ids=counted(mask),
        mc_token_ids=places,
        labels=labels.unflatten(0, (2, 3)),
        mc_labels=ANSWERS,
        output_hidden_states=True,
    )
    same(mine.sentence_logits, other.mc_logits)
    same(mine.logits[mask.bool()], other.logits.flatten(0, 1)[mask.bool()])
    same(mine.loss, other.loss + other.mc_loss)
    for actual, expected in zip(mine.hidden_states, other.hidden_states, strict=True):
        same(actual[mask.bool()], expected.reshape(actual.shape)[mask.bool()])
    compare_gradients(ours, mine.loss, theirs, other.loss + other.mc_loss)
    back(ours, theirs, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_without_places_the_last_token_is_read(name: str):
    """Theirs reads the last slot: the last token where nothing is padding, or padding is on the left."""
    theirs = shaken(their_model(name, TASK))
    ours = from_transformers(theirs)
    inputs, _, _ = questions("left")
    mask = inputs["attention_mask"].flatten(0, 1)
    with torch.no_grad():
        expected = theirs(inputs["input_ids"], attention_mask=mask, position_ids=counted(mask)).mc_logits
        same(ours(**inputs).sentence_logits, expected)
        right, _, _ = questions("right")
        ends = right["attention_mask"].sum(-1) - 1
        expected = theirs(
            right["input_ids"], attention_mask=right["attention_mask"].flatten(0, 1), mc_token_ids=ends
        ).mc_logits
        same(ours(**right).sentence_logits, expected)


def test_it_writes_what_the_language_model_writes(tmp_path: Path):
    shaken(their_model("gpt2", TASK)).save_pretrained(tmp_path)
    ours, language_model = (
        polyformer.from_pretrained(tmp_path, head=head) for head in (None, "language_model")
    )
    prompt = torch.tensor([[3, 5, 7]])
    actual, expected = (
        model.generate(prompt, max_new_tokens=6).sequences for model in (ours, language_model)
    )
    assert torch.equal(actual, expected)


def test_wrapped_it_returns_two_losses(tmp_path: Path):
    theirs = shaken(their_model("openai-gpt", TASK))
    wrapped = hub.wrap(from_transformers(copy.deepcopy(theirs)))
    wrapped.save_pretrained(tmp_path)
    again = type(wrapped).from_pretrained(tmp_path, dtype=torch.float64)
    inputs, labels, places = questions("right")
    asked = {"mc_token_ids": places, "labels": labels.unflatten(0, (2, 3)), "mc_labels": ANSWERS}
    actual = again(**inputs, **asked)
    expected = theirs(inputs["input_ids"], attention_mask=inputs["attention_mask"].flatten(0, 1), **asked)
    for name in ("loss", "mc_loss", "mc_logits"):
        same(actual[name], expected[name])
    assert actual.logits.shape == expected.logits.shape


def test_places_that_are_none_are_refused():
    ours = from_transformers(their_model("gpt2", TASK).eval())
    inputs, _, places = questions("right")
    for wrong, message in (
        (places[:, :2], r"score_positions: expected the shape \(2, 3\), got \(2, 2\)"),
        (places - 20, "score_positions: expected 0 or more"),
        (places + 20, "score_positions: expected 0 to 10, got"),
        (places.new_full((2, 3), 10), "score_positions: expected a token of each text, got 10, which is pad"),
        (places.double(), "score_positions: expected integers"),
    ):
        with pytest.raises(InputError, match=message):
            ours(**inputs, score_positions=wrong)
    other = from_transformers(their_model("gpt2", "LMHeadModel").eval())
    with pytest.raises(InputError, match="score_positions: only heads of multiple choice take them"):
        other(inputs["input_ids"][0], score_positions=places[:1])
