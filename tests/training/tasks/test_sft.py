"""Instruction tuning: only the assistant's tokens count, and packed conversations do not see each other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from chat_models import chat_folder, chat_tokenizer
from chat_templates import CHATML, TEMPLATES
from polyformer.core.errors import InputError
from polyformer.core.host_values import IGNORED
from polyformer.data import Splits
from polyformer.data.chat import ChatTemplate
from polyformer.data.rows.packing import learned_spans, pack_whole
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import InstructionTuning, InstructionTuningConfig, TaskWithData
from training.tasks.fitted import learned

SAID = [("Is it 2?", "Yes."), ("Why?", "It is so: 1 + 1.\nAlways."), ("A film?", "Fine, funny."), ("?", "No")]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def row(*turns: tuple[str, str], system: str | None = None) -> dict[str, str]:
    messages = [turn("system", system)] if system else []
    for asked, reply in turns:
        messages += [turn("user", asked), turn("assistant", reply)]
    return {"conversation": json.dumps({"messages": messages})}


ROWS = [row(SAID[0]), row(SAID[1], SAID[2]), row(SAID[3], system="Be brief."), row(*SAID), row(SAID[2])]


def task_of(template: str = CHATML, **options: Any) -> InstructionTuning:
    config = InstructionTuningConfig(**{"row_length": 256, "batch_tokens": 512, **options})
    return config.build(chat_tokenizer(template))


def model_of(task: InstructionTuning, preset: str = "llama-7b") -> Transformer:
    torch.manual_seed(0)
    keys = {"num_key_value_heads": 1} if preset == "llama-7b" else {}
    sizes = {
        **keys,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    return Transformer(task.adapt(model_config(preset, sizes))).double().eval()


def test_the_assistants_text_and_the_end_of_its_turn_are_learned():
    task = task_of()
    packed = task.rows.prepare([ROWS[1]])[0]
    words = [packed["labels"][i] != IGNORED for i in range(len(packed["labels"]))]
    text = "".join(
        task.tokenizer.decode([i], keep_special=True) for i, w in zip(packed["input_ids"], words) if w
    )
    assert text == "It is so: 1 + 1.\nAlways.<|im_end|>\nFine, funny.<|im_end|>\n"


@pytest.mark.parametrize("name", ["chatml", "smollm2", "llama3", "learned"])
def test_marks_of_a_template_and_differences_of_renderings_agree(name: str):
    """The tag marks contents where differences include the end of the turn, so each span begins alike."""
    messages = json.loads(ROWS[3]["conversation"])["messages"]
    chat = ChatTemplate({"default": TEMPLATES[name]}, {"bos_token": "<s>", "eos_token": "</s>"})
    rendered = learned_spans(chat, messages)
    replies = [rendered.text[start:stop] for start, stop in rendered.spans]
    assert len(replies) == len(SAID)
    assert all(reply.startswith(said[1]) for reply, said in zip(replies, SAID))


def test_only_the_last_reply_of_a_conversation_can_be_learned():
    messages = json.loads(ROWS[1]["conversation"])["messages"]
    for name in ("chatml", "learned"):
        rendered = learned_spans(ChatTemplate({"default": TEMPLATES[name]}), messages, last_only=True)
        ((start, stop),) = rendered.spans
        assert rendered.text[start:stop].startswith("Fine, funny.")


FORGETS = """
{%- for m in messages %}
    {{- m['role'] + ': ' + (m['content'] if loop.last or m['role'] == 'user' else '-') + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""


def test_templates_that_change_earlier_messages_are_refused_by_name():
    with pytest.raises(InputError, match="conversation 2: chat template 'default': it changes the beginning"):
        task_of(FORGETS).rows.prepare(ROWS[:2])
    task_of(FORGETS).rows.prepare(ROWS[:1])


def test_a_conversation_that_the_assistant_begins_needs_marks_in_the_template():
    rows = [{"conversation": json.dumps({"messages": [turn("assistant", "Hi"), turn("user", "?")]})}]
    with pytest.raises(InputError, match="the assistant's message is the first"):
        task_of().rows.prepare(rows)


@pytest.mark.parametrize("preset", ["llama-7b", "gpt2"])
def test_the_loss_of_packed_rows_is_the_weighted_mean_of_single_conversations(preset: str):
    task = task_of()
    model = model_of(task, preset)
    collate, weight = task.rows.collate, task.objective.weight

    def total(rows: list[Any]) -> tuple[torch.Tensor, int]:
        batch = collate(rows)
        return task.objective.loss(model, batch) * weight(batch), weight(batch)

    packed = task.rows.prepare(ROWS)
    assert len(packed) < len(ROWS)
    joint, joint_weight = total(packed)
    singles = [total(task.rows.prepare([single])) for single in ROWS]
    assert joint_weight == sum(count for _, count in singles)
    torch.testing.assert_close(joint, torch.stack([nats for nats, _ in singles]).sum(), rtol=0, atol=1e-10)
    single_gradient = gradient(model, sum(nats for nats, _ in singles))
    torch.testing.assert_close(gradient(model, joint), single_gradient, rtol=0, atol=1e-10)


def gradient(model: Transformer, loss: Any) -> torch.Tensor:
    return torch.cat(
        [x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
    )


def test_the_loss_is_that_of_a_conversation_without_packing():
    """The definition: the mean of -log P of the learned tokens, each after all tokens before it."""
    task = task_of()
    model = model_of(task)
    ids, marks = task.rows.marked(ROWS[3], "conversation", 1)
    log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    terms = [-log_p[t - 1, ids[t]] for t in range(1, len(ids)) if marks[t]]
    batch = task.rows.collate(task.rows.prepare([ROWS[3]]))
    torch.testing.assert_close(
        task.objective.loss(model, batch), torch.stack(terms).mean(), rtol=0, atol=1e-10
    )


def test_long_conversations_are_refused_or_keep_their_end():
    with pytest.raises(
        InputError, match=r"conversation 2 has .* tokens, more than task.row_length 64; raise it"
    ):
        task_of(row_length=64).rows.prepare(ROWS)
    task = task_of(row_length=64, too_long="truncate")
    whole, _ = task_of().rows.marked(ROWS[3], "conversation", 1)
    ids, marks = task.rows.marked(ROWS[3], "conversation", 1)
    assert ids == whole[-64:]
    assert len(marks) == 64


class Streamed:
    """Rows without a length."""

    def __iter__(self):
        return iter(ROWS)


def test_an_example_with_marks_and_the_counts_are_noted_once():
    task = task_of()
    TaskWithData(task, Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
    example, counts = task.notes
    streamed = task_of()
    streamed.rows.training_batches(Streamed(), 0)
    assert streamed.notes == [example], "before the first block is read"
    assert "<|im_start|>user\nIs it 2?<|im_end|>\n<|im_start|>assistant\n⟦Yes.<|im_end|>\n⟧" in example
    assert counts.startswith("5 conversations in ")


def test_a_small_model_learns_the_replies():
    before, after = learned(task_of(), model_config("decoder-tiny"), ROWS, steps=30, lr=1e-2)
    assert after["loss"] < before["loss"] / 3


def test_tokenizers_without_a_template_are_refused_and_a_file_names_another(tmp_path: Path):
    with pytest.raises(InputError, match="tokenizer: it has no chat template"):
        InstructionTuningConfig().build(chat_tokenizer(None))
    file = tmp_path / "chat.jinja"
    file.write_text(CHATML)
    config = InstructionTuningConfig(template=str(file)).resolve([])
    file.unlink()
    task = config.resolve([]).build(chat_tokenizer(None))
    assert task.tokenizer.chat.render([turn("user", "Hi")]) == "<|im_start|>user\nHi<|im_end|>\n"


def test_rows_hold_whole_documents_up_to_their_length():
    sizes = [5, 9, 3, 7, 1, 10, 2]
    documents = [([i + 1] * size, [True] * size) for i, size in enumerate(sizes)]
    rows = pack_whole(documents, 10)
    assert [len(row["input_ids"]) for row in rows] == [7, 10, 10, 10], "37 tokens, the longest placed first"
    assert sorted(i for row in rows for i in row["input_ids"]) == sorted(
        i for ids, _ in documents for i in ids
    )
    with pytest.raises(InputError, match="a document has 10 tokens, more than the 9"):
        pack_whole(documents, 9)


@pytest.mark.parametrize("tuning", [None, "lora(rank=2)"])
def test_a_chat_model_is_tuned_and_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tuning: str | None
):
    from polyformer.cli.main import main

    folder, data, run = chat_folder(tmp_path / "model"), tmp_path / "chats.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in SAID * 10))
    words = ["train", "--data", str(data), "--pretrained", str(folder), "--steps", "4", "--out", str(run)]
    words += [] if tuning is None else ["--tuning", tuning]
    assert main([*words, "--task.row_length", "128", "--task.batch_tokens", "256", "--device", "cpu"]) in (
        0,
        None,
    )
    said = capsys.readouterr().out
    assert "guessed task: sft, prompt and completion are completions (--task.kind)" in said
    assert "⟦Yes.<|im_end|>\n⟧" in said
    from polyformer import load

    model: Any = load(run, device="cpu")
    chat = model.conversation(max_new_tokens=3)
    assert isinstance(chat.reply("Why?"), str)
    assert main(["evaluate", str(run), "--data", str(data), "--device", "cpu"]) in (0, None)
    assert "perplexity" in capsys.readouterr().out
