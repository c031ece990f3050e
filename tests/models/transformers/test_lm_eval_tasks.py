"""lm-eval's harness runs wrapped models on tasks of one's own: choices and the loss of whole texts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import polyformer.models.transformers
from polyformer import create_model
from polyformer.data import TokenizerConfig
from polyformer.data.tokenizers import build_tokenizer

TEXTS = [f"line {i} of a small text" for i in range(60)]
ROWS = [
    {"text": "line 3 of", "choices": [" a small text", " text line"], "gold": 0},
    {"text": "a small", "choices": [" of line", " text"], "gold": 1},
    {"text": "line", "choices": [" 3", " 4 of"], "gold": 1},
]
CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXT = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""


def direct(model: Any, tokenizer: Any, prompt: str, continuation: str) -> float:
    """log p(continuation | prompt), computed in one pass."""
    start, ids = len(tokenizer.encode(prompt)), tokenizer.encode(prompt) + tokenizer.encode(continuation)
    with torch.no_grad():
        chances = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(chances[place - 1, ids[place]]) for place in range(start, len(ids)))


@pytest.mark.filterwarnings("ignore")  # of the harness's own
def test_local_tasks_are_scored_as_the_model_itself_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lm_eval = pytest.importorskip("lm_eval")
    import datasets
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 300}
    model = create_model("decoder-tiny", **sizes, position="rope", attention="Window(8) | Global(1)").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # sure enough of itself that rounding decides no choice
    polyformer.models.transformers.wrap(model).save_pretrained(tmp_path / "model")
    tokenizer = build_tokenizer(TokenizerConfig(algorithm="bpe", vocab_size=300), TEXTS)
    tokenizer.save(tmp_path / "model")
    for name, rows in {"choices": ROWS, "texts": [{"text": text} for text in TEXTS[:4]]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in {"choices": CHOICES, "text": TEXT}.items():
        (tmp_path / f"{name}.yaml").write_text(task.replace("FOLDER", str(tmp_path)))
    answers = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "model"), "trust_remote_code": True, "max_length": 32},
        tasks=["local_choices", "local_text"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=2,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = answers["samples"]["local_choices"]
    right = 0
    for sample in samples:
        row = sample["doc"]
        expected = [direct(model, tokenizer, row["text"], choice) for choice in row["choices"]]
        scores = [float(response[0]) for response in sample["filtered_resps"]]
        assert scores == pytest.approx(expected, abs=1e-4)
        right += max((0, 1), key=expected.__getitem__) == row["gold"]
    assert len(samples) == 3
    assert answers["results"]["local_choices"]["acc,none"] == pytest.approx(right / 3)
    # The harness puts a mark before a text, so that its first token is predicted too.
    total, first = 0.0, tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    for text in TEXTS[:4]:
        ids = [first, *tokenizer.encode(text)]
        with torch.no_grad():
            chances = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        total += sum(float(chances[i, token]) for i, token in enumerate(ids[1:]))
    count = sum(len(text.encode()) for text in TEXTS[:4])
    expected = -total / count / math.log(2)
    assert answers["results"]["local_text"]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-4)
