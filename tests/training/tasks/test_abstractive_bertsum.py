"""BertSum's abstractive form: sources by sentences, and an encoder that starts from the extractive one."""

from typing import Any

import pytest
import torch

from polyformer.data import TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import start_from
from polyformer.models.generation import BeamConfig
from polyformer.models.presets import create_model, model_config
from polyformer.training.tasks import Summarization, SummarizationConfig

pytest.importorskip("rouge_score")

SOURCE = "The river was high in spring. A boat came from the north. Nobody saw the men again."
ROWS = [
    {"source": SOURCE, "target": "A boat came."},
    {"source": "Bread was cheap that year. Men ate bread.", "target": "Bread was cheap."},
]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "dropout": 0.0,
}


def build(**options: Any) -> tuple[Summarization, Transformer]:
    options = {"max_length": 64, "max_summary": 12, "batch_tokens": 256, "by_sentence": True, **options}
    config = SummarizationConfig(beam=BeamConfig(num_beams=1), **options)
    task = config.build(config.tokenizer(TokenizerConfig(algorithm="bpe", vocab_size=400), ROWS))
    torch.manual_seed(0)
    return task, Transformer(task.adapt(model_config("bertsum-abs-small", SIZES))).eval()


def test_every_sentence_has_its_own_first_token_and_type():
    task, model = build()
    row = task.rows.prepare(ROWS)[0]
    ids, types = row["input_ids"], row["token_type_ids"]
    starts = [place for place, token in enumerate(ids) if token == task.tokenizer.cls_id]
    assert [types[place] for place in starts] == [0, 1, 0]
    assert ids.count(task.tokenizer.sep_id) == 3
    assert model.config.embedding.type_vocab_size == 2
    assert task.rows.source_rows([""])[0]["input_ids"] == [task.tokenizer.cls_id, task.tokenizer.sep_id]


def test_a_text_that_does_not_fit_is_counted():
    task, _ = build(max_length=24)
    task.rows.prepare(ROWS)
    assert any("sources are cut to 24 tokens" in note for note in task.notes)
    assert all(len(row["input_ids"]) <= 24 for row in task.rows.source_rows([SOURCE, "river " * 90]))


def test_a_model_learns_to_write_summaries_and_reads_the_types():
    task, model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ((_, batch),) = task.rows.training_batches(ROWS, seed=0).epoch(0)
    for _ in range(80):
        optimizer.zero_grad()
        task.objective.loss(model, batch).backward()
        optimizer.step()
    assert task.translate(model, [row["source"] for row in ROWS]) == [row["target"] for row in ROWS]
    plain = {**batch, "token_type_ids": torch.zeros_like(batch["token_type_ids"])}
    assert (model(**batch).logits - model(**plain).logits).abs().max() > 1e-4


def test_the_encoder_starts_from_the_extractive_summarizer(tmp_path: Any):
    """Section 3.2: first extraction, then the decoder with its own token table."""
    sizes = {**SIZES, "vocab_size": 60}
    extractive = create_model("bertsum-small", **sizes)
    extractive.save_pretrained(tmp_path)
    model = create_model("bertsum-abs-small", **sizes)
    report = start_from(tmp_path, model)
    assert {name for name in report.newly_initialized if name.startswith("encoder")} == set()
    tensors, old = model.state_dict(), extractive.state_dict()
    assert torch.equal(tensors["tokens.weight"], old["tokens.weight"])
    assert not torch.equal(tensors["decoder_tokens.weight"], old["tokens.weight"])
    assert "decoder_tokens.weight" in report.newly_initialized
