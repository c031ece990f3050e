"""Files of conversations, instructions and preferences become messages, whatever their form."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from polyformer.core.errors import InputError
from polyformer.data import DataConfig
from polyformer.data.formats.chats import conversations, form_of, preferences
from polyformer.data.formats.guess import guess
from polyformer.data.sources.splits import read

USER, REPLY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("messages", {"messages": [USER, REPLY]}),
    "sharegpt": (
        "turns",
        {"id": "7", "conversations": [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]},
    ),
    "alpaca": ("instructions", {"instruction": "1 + 1?", "input": "", "output": "2"}),
    "completion": ("completions", {"prompt": "1 + 1?", "completion": "2"}),
    "messages of a completion": ("completions", {"prompt": [USER], "completion": [REPLY]}),
}


def said(row: dict[str, Any], **columns: str) -> Any:
    return json.loads(next(conversations([row], columns, "x"))["conversation"])


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_the_same_conversation(name: str):
    form, row = FORMS[name]
    assert form_of(row) is not None
    assert (form_of(row) or ("",))[0] == form
    assert said(row) == {"messages": [USER, REPLY]}


def test_the_system_message_the_input_and_the_tools_are_kept():
    row = {"instruction": "Add", "input": "1, 1", "output": "2", "system": "Be brief."}
    assert said(row)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add\n\n1, 1"},
        REPLY,
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert said({"messages": [USER, REPLY], "tools": json.dumps(tools)})["tools"] == tools


def test_the_users_column_of_chats_is_read():
    assert said({"talk": [USER, REPLY], "note": "x"}, messages="talk") == {"messages": [USER, REPLY]}


def test_preferences_are_two_conversations_that_differ_in_the_reply():
    other = {"role": "assistant", "content": "3"}
    rows = [
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [REPLY], "rejected": [other]},
        {"prompt": "1 + 1?", "chosen": [USER, REPLY], "rejected": [USER, other]},
        {"chosen": [USER, REPLY], "rejected": [USER, other]},
    ]
    for row in preferences(rows, {}, "x"):
        assert json.loads(row["chosen"]) == {"messages": [USER, REPLY]}
        assert json.loads(row["rejected"]) == {"messages": [USER, other]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "2", "rejected": "3"}, "x, row 1: expected a prompt and a reply"),
        (
            {"chosen": [{**USER, "content": "2 + 2?"}, REPLY], "rejected": [USER, REPLY]},
            "x, row 1: chosen and rejected .* differ before their last message",
        ),
        ({"text": "2"}, "x, row 1: expected preferences"),
    ],
)
def test_preferences_without_a_common_prompt_are_refused(row: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        list(preferences([row], {}, "x"))


def test_unknown_roles_and_forms_are_refused_by_row():
    with pytest.raises(InputError, match="x, row 2: the role of a message is 'judge'; expected user, human"):
        list(conversations([{"messages": [USER]}, {"messages": [{**USER, "role": "judge"}]}], {}, "x"))
    with pytest.raises(InputError, match=r"x, row 1: expected chats or instructions .* got the columns 'a'"):
        list(conversations([{"a": 1}], {}, "x"))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_files_are_recognized_and_read(tmp_path: Path, name: str, ending: str):
    form, row = FORMS[name]
    rows, path = [{**row, "number": i} for i in range(3)], tmp_path / f"chats.{ending}"
    if ending == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows) if ending == "json" else "".join(json.dumps(r) + "\n" for r in rows))
    guessed = guess(str(path), {}, chats=True)
    assert guessed.kind == "sft"
    assert any("guessed task: sft" in line and form in line for line in guessed.said)
    data = read(DataConfig(path=str(path)), ("conversation",), str(path))
    texts = [row["conversation"] for row in data]  # type: ignore[call-overload, index]
    assert [json.loads(text) for text in texts] == 3 * [{"messages": [USER, REPLY]}]


def test_preferences_are_recognized(tmp_path: Path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}) + "\n")
    guessed = guess(str(path), {}, chats=True)
    assert guessed.kind == "dpo"
    assert "prompt and chosen and rejected are preferences" in guessed.said[0]


@pytest.mark.parametrize("name", FORMS)
def test_without_a_chat_model_the_ways_out_are_said(tmp_path: Path, name: str):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(FORMS[name][1]) + "\n")
    with pytest.raises(InputError, match=r"name a chat model that learns from them with --pretrained MODEL"):
        guess(str(path), {})


def test_completions_with_a_label_are_not_all_examples(tmp_path: Path):
    path = tmp_path / "kto.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "label": False}) + "\n")
    with pytest.raises(InputError, match="'prompt' and 'completion' are requests with replies"):
        guess(str(path), {}, chats=True)
    with pytest.raises(InputError, match="expected chats or instructions"):
        read(DataConfig(path=str(path)), ("conversation",), str(path))


def test_other_data_are_guessed_as_without_a_chat_model(tmp_path: Path):
    rows = {
        "qa.jsonl": {"question": "q", "context": "c", "answers": {"text": ["c"], "answer_start": [0]}},
        "classify.jsonl": {"text": "t", "label": "x"},
        "lm.jsonl": {"text": "t"},
        "translate.jsonl": {"source": "a", "target": "b"},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        assert guess(str(tmp_path / name), {}, chats=True).kind == name.partition(".")[0]
