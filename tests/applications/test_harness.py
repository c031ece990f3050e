"""lm-eval's tasks through our interface: the figures of the harness's own model for the same weights."""

import json
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager

import polyformer.models.transformers
from polyformer import create_model
from polyformer.applications.harness import HarnessSettings, TokenReader, evaluate_tasks
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer
from polyformer.training.recipes.run import writer
from polyformer.training.tasks.lm import LanguageModelling

TEXTS = [f"line {i} of a small text" for i in range(60)]
ROWS = [
    {"text": "line 3 of", "choices": [" a small text", " text line"], "gold": 0},
    {"text": "a small", "choices": [" of line", " text"], "gold": 1},
    {"text": "line 4 of a small text line 5 of a small text", "choices": [" 3", " 4 of", " line"], "gold": 1},
]
SHARED = """
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/FILE.jsonl}}
test_split: test
"""
TASKS = {
    "own_choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "own_texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
""",
    "own_writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["x"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, and task files with their data."""
    out = tmp_path_factory.mktemp("harness")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 300}
    model = create_model("decoder-tiny", **sizes, position="rope").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # sure enough of itself that rounding decides no choice
    polyformer.models.transformers.wrap(model).save_pretrained(out / "wrapped")
    model.save_pretrained(out / "model")
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="bpe", vocab_size=300), TEXTS)
    for name in ("wrapped", "model"):
        tokenizer.save(out / name)
    rows = {"questions": ROWS, "texts": [{"text": " ".join(TEXTS[i : i + 9])} for i in range(0, 36, 9)]}
    for name, lines in rows.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in TASKS.items():
        shared = SHARED.replace("FILE", "texts" if name == "own_texts" else "questions")
        (out / f"{name}.yaml").write_text(f"task: {name}" + shared.replace("FOLDER", str(out)) + text)
    return out


@pytest.fixture(autouse=True)
def _cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")


@pytest.mark.filterwarnings("ignore")  # of the harness's own
def test_figures_are_those_of_the_harness_s_own_model(folder: Path):
    """Texts are longer than the window of 16 tokens, and prompts are cut to it."""
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "wrapped"), "trust_remote_code": True, "max_length": 16},
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=100,
    )
    assert theirs is not None
    task, model = writer(folder / "model", LanguageModelling, "cpu")
    ours = evaluate_tasks(task, model, list(TASKS), HarnessSettings(folder=str(folder), max_length=16))
    for name in TASKS:
        theirs_by_name = {key: x for key, x in theirs["results"][name].items() if isinstance(x, float)}
        assert theirs_by_name
        own = {key: ours["results"][name][key] for key in theirs_by_name if "stderr" not in key}
        expected = {key: x for key, x in theirs_by_name.items() if "stderr" not in key}
        assert own == pytest.approx(expected, rel=1e-4), name


def test_written_answers_are_those_of_generate(folder: Path):
    task, model = writer(folder / "model", LanguageModelling, "cpu")
    reader = TokenReader(task, model, HarnessSettings(batch_tokens=20))
    texts = reader.generated([(row["text"], {"until": ["x", " "], "max_gen_toks": 6}) for row in ROWS])
    for row, text in zip(ROWS, texts, strict=True):
        ids = torch.tensor([task.start(row["text"])])
        alone = model.generate(ids, max_new_tokens=6)
        whole = task.tokenizer.decode(alone.sequences[0].tolist())
        expected = whole.removeprefix(task.tokenizer.decode(ids[0].tolist()))
        assert text == expected.split("x")[0].split(" ")[0]


def test_a_score_is_the_sum_of_the_answer_s_tokens(folder: Path):
    task, model = writer(folder / "model", LanguageModelling, "cpu")
    reader = TokenReader(task, model, HarnessSettings(batch_tokens=8))
    greedy = model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=3).sequences[0, 3:].tolist()
    partly = [*greedy[:2], (greedy[2] + 1) % 300]
    rows = [([7, 8, 9], [10, 11]), ([5], [6]), ([4, 4], [4, 4, 4, 4])]
    rows += [([7, 8, 9], greedy), ([7, 8, 9], partly)]
    scores = reader.scores(rows)
    assert [leads for _, leads in scores[3:]] == [True, False]
    for (context, answer), (score, leads) in zip(rows, scores, strict=True):
        with torch.no_grad():
            log_p = model(torch.tensor([context + answer])).logits[0].double().log_softmax(-1)
        places = range(len(context) - 1, len(context) + len(answer) - 1)
        assert score == pytest.approx(sum(float(log_p[i, t]) for i, t in zip(places, answer)), abs=1e-5)
        assert leads == all(int(log_p[i].argmax()) == t for i, t in zip(places, answer))


def test_a_policy_of_the_cache_applies_to_written_answers(folder: Path):
    task, model = writer(folder / "model", LanguageModelling, "cpu")
    request = [(" ".join(TEXTS[:6]), {"until": ["x"], "max_gen_toks": 6})]
    texts: dict[Any, list[str]] = {}
    for cache in (None, "snapkv(budget=6, window=2)"):
        texts[cache] = TokenReader(task, model, HarnessSettings(cache=cache)).generated(request)
    assert texts[None] != texts["snapkv(budget=6, window=2)"]


@pytest.mark.filterwarnings("ignore")
def test_the_command_prints_the_table(folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["evaluate", str(folder / "model"), "--tasks", "own_choices", "--task-folder", str(folder)]
    assert main([*words, "--limit", "2"]) == 0
    assert "|own_choices|Yaml   |none  |     0|acc" in capsys.readouterr().out
    assert main([*words[:3], "own_choice", *words[4:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("polyformer: error: tasks: the harness has no task 'own_choice' and none is in")
    assert main([*words[:2], "--limit", "2"]) == 2
    assert "--limit: requires --tasks" in capsys.readouterr().err


def test_new_tokens_leave_room_for_a_prompt(folder: Path):
    task, model = writer(folder / "model", LanguageModelling, "cpu")
    reader = TokenReader(task, model, HarnessSettings(max_length=16))
    with pytest.raises(InputError, match="max_length: 16 new tokens leave no room"):
        reader.generated([("line", {"max_gen_toks": 16})])
