"""Multiple choice: choices and labels of rows, batches, metrics, and a model that learns."""

import json
from pathlib import Path

import pytest
import torch
from fitted import learned

from polyformer import InputError
from polyformer.data import DataConfig, Splits, Tokenizer, TokenizerConfig, read
from polyformer.data.formats.columns import columns_of_choices, listed, right_choice
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import MultipleChoice, MultipleChoiceConfig, TaskWithData

ENDINGS = {"cat": "miaows", "dog": "barks", "cow": "moos loudly in the field"}
ROWS = [
    {"text": f"the {animal} {i}", "choices": list(ENDINGS.values())[turn:] + list(ENDINGS.values())[:turn]}
    for animal in ENDINGS
    for i in range(2)
    for turn in range(3)
]
for _row in ROWS:
    _row["label"] = ENDINGS[_row["text"].split()[1]]
ROWS[0] |= {"choices": ROWS[0]["choices"][:2]}  # not all have as many
NEEDS = ("text", "choices", "label")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = TokenizerConfig(algorithm="wordpiece", vocab_size=80)
    return Tokenizer.train(config, MultipleChoiceConfig().texts(ROWS))


def build(tokenizer: Tokenizer, **options: object) -> MultipleChoice:
    return MultipleChoiceConfig(**{"batch_tokens": 256, "max_length": 20, **options}).build(tokenizer)  # type: ignore[arg-type]


def test_a_batch_has_the_rows_of_every_choice(tokenizer: Tokenizer):
    task = build(tokenizer)
    batch = task.rows.collate(task.rows.prepare(ROWS[:3]))
    assert batch["labels"].tolist() == [0, 2, 1]
    for i, row in enumerate(ROWS[:3]):
        for c, choice in enumerate(row["choices"]):
            text, end = tokenizer.encode(row["text"]), tokenizer.encode(choice)
            ids = [tokenizer.cls_id, *text, tokenizer.sep_id, *end, tokenizer.sep_id]
            real = batch["attention_mask"][i, c] == 1
            assert batch["input_ids"][i, c][real].tolist() == ids
            types = [0] * (len(text) + 2) + [1] * (len(end) + 1)
            assert batch["token_type_ids"][i, c][real].tolist() == types
            assert (batch["input_ids"][i, c][~real] == tokenizer.pad_id).all()
    assert batch["attention_mask"][0, 2].sum() == 0  # the first question has two choices


@torch.no_grad()
def test_a_batch_changes_no_score(tokenizer: Tokenizer):
    task = build(tokenizer)
    torch.manual_seed(0)
    model = Transformer(task.adapt(model_config("encoder-tiny"))).double().eval()
    alone = [task.choose(model, [row])[0] for row in ROWS]
    for shares, expected, row in zip(task.choose(model, ROWS), alone, ROWS):
        assert len(shares) == len(row["choices"])
        assert shares == pytest.approx(expected, abs=1e-12)
        assert sum(shares) == pytest.approx(1)


def test_a_model_learns_and_is_measured_beside_the_majority(tokenizer: Tokenizer):
    task = build(tokenizer, batch_tokens=2048)
    before, after = learned(task, model_config("encoder-tiny"), ROWS, steps=150, lr=5e-4)
    assert after["loss"] < 0.3 < 1 < before["loss"]
    assert after["accuracy"] == 1
    held = task.rows.held_out(ROWS[:4])  # the places 0, 2, 1, 0
    assert held.counts == {"majority": 0.5}
    assert task.metrics.values([3.0, 1.0, 2.0], held.counts) == {
        "loss": 1.5,
        "accuracy": 0.5,
        "majority": 0.5,
    }


def test_batches_have_room_for_all_choices(tokenizer: Tokenizer):
    fitting = TaskWithData(build(tokenizer, batch_tokens=100), Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
    for batch in fitting.batches(0, 0, 0, 1):
        assert batch["input_ids"].numel() <= 100
    with pytest.raises(InputError, match=r"with its 3 choices has .* tokens, more than task.batch_tokens 20"):
        build(tokenizer, batch_tokens=20).rows.prepare(ROWS[1:])


def test_long_ones_are_refused_or_cut(tokenizer: Tokenizer):
    with pytest.raises(InputError, match=r"text 'the cow 0' with its choice 'moos loud.* task.max_length 8"):
        build(tokenizer, max_length=8).rows.prepare(ROWS[-6:-5])
    task = build(tokenizer, max_length=8, too_long="cut")
    assert len(task.rows.prepare(ROWS[-6:-5])[0]["input_ids"]) == 24
    assert task.notes == ["1 of 3 choices with their texts are cut to 8 tokens"]


@pytest.mark.parametrize(
    ("label", "first", "place"),
    [
        (0, 0, 0),
        ("2", 0, 2),
        (1, 1, 0),
        ("3", 1, 2),
        ("B", 0, 1),
        ("c", 0, 2),
        ("red", 0, 0),
        (" blue", 0, 2),
    ],
)
def test_a_label_is_a_number_a_letter_or_a_text(label: object, first: int, place: int):
    assert right_choice(label, ["red", "green", "blue "], first) == place


@pytest.mark.parametrize("label", [3, -1, "D", "pink", "", 1.0, True, "9" * 5000])
def test_a_label_that_is_none_of_the_choices(label: object):
    with pytest.raises(InputError, match=r"label: expected the number \(0 to 2\), the letter or the text"):
        right_choice(label, ["red", "green", "blue"], 0)


def test_a_label_that_could_be_several_choices():
    assert right_choice("4", ["3", "4"], 0) == 1
    assert right_choice(1, ["1", "3"], 0) == 1
    for label, choices in (("1", ["1", "3"]), ("A", ["B", "A"]), ("red", ["red", "red"])):
        with pytest.raises(InputError, match="which could be several of them"):
            right_choice(label, choices, 0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("sent1 startphrase ending0 ending2 ending1 label", "startphrase | ending0,ending1,ending2 | label"),
        ("ind ctx_a ctx endings label", "ctx | endings | label"),
        ("premise choice1 choice2 question label", "premise,question | choice1,choice2 | label"),
        ("article question options answer", "article,question | options | answer"),
        (
            "context question answerA answerB answerC label",
            "context,question | answerA,answerB,answerC | label",
        ),
        ("goal sol1 sol2 label", "goal | sol1,sol2 | label"),
    ],
)
def test_columns_by_their_usual_names(names: str, expected: str):
    roles = dict(zip(NEEDS, expected.split(" | ")))
    assert columns_of_choices(names.split()) == roles


def test_choices_of_columns_and_of_lists_are_the_same(tmp_path: Path):
    (tmp_path / "a.csv").write_text(
        "q,c,x,y,z,label\nwhat,how,red,green,\nhm,,red,,blue,2\n".replace("green,\n", "green,,0\n")
    )
    (tmp_path / "b.csv").write_text(
        'q,choices,label\nwhat how,"[""red"", ""green""]",0\nhm,"[""red"", """", ""blue""]",2\n'
    )
    columns = {"text": "q,c", "choices": "x, y, z"}
    rows = list(read(DataConfig(columns=columns), NEEDS, str(tmp_path / "a.csv")))
    assert rows == list(read(DataConfig(columns={"text": "q"}), NEEDS, str(tmp_path / "b.csv")))
    assert [row["choices"] for row in rows] == [["red", "green"], ["red", "", "blue"]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("red", "b.jsonl, row 1: column 'choices': not JSON .*expected a list of choices"),
        (["red"], "row 1: column 'choices': expected two choices or more, got .'red'."),
        (["red", 1], "row 1: column 'choices' holds .*, expected a list of texts"),
        ({"text": ["a", "b"]}, "row 1: column 'choices' holds .*, expected a list of texts"),
        (None, "row 1: column 'choices' holds None, expected a list of texts"),
    ],
)
def test_choices_that_are_no_list_of_texts_are_refused(choices: object, message: str, tmp_path: Path):
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"text": "a", "choices": choices, "label": 0}))
    with pytest.raises(InputError, match=message):
        read(DataConfig(), NEEDS, str(path))


def test_a_column_that_is_not_there(tmp_path: Path):
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps({"text": "a", "x": "b", "label": 0}))
    with pytest.raises(InputError, match=r"row 1: no column 'x,y' \(columns gives it for 'choices'\)"):
        read(DataConfig(columns={"choices": "x,y"}), NEEDS, str(path))
    with pytest.raises(InputError, match="--choices: not JSON"):
        listed("red, green", "--choices")
