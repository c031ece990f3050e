"""ETC's pre-training task: what is hidden, what is measured, and the model that it makes."""

import numpy as np
import pytest
import torch

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import ETC
from polyformer.attention.positions import EtcLabelsConfig
from polyformer.core.errors import InputError
from polyformer.data import Splits, Tokenizer, TokenizerConfig, default_documents
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import ContrastiveModelling, ContrastiveModellingConfig, TaskWithData

ROWS = [{"text": text[:400]} for text in default_documents()[:4]]


@pytest.fixture(scope="module")
def task() -> ContrastiveModelling:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    config = ContrastiveModellingConfig(row_length=120, global_tokens=6, batch_tokens=600, sentence_share=0.3)
    return config.build(tokenizer)


@pytest.fixture(scope="module")
def model(task: ContrastiveModelling) -> Transformer:
    torch.manual_seed(0)
    return Transformer(task.adapt(model_config("etc-tiny"))).eval()


def test_rows_keep_the_text_and_their_limits(task: ContrastiveModelling):
    rows = task.rows.prepare(ROWS)
    assert all((row["token_type_ids"] == 0).sum() <= 6 for row in rows)
    text = [row["input_ids"][row["token_type_ids"] == 1] for row in rows]
    assert max(map(len, text)) <= 120
    whole = "".join("".join(row["text"].split()) for row in ROWS)
    assert "".join(task.tokenizer.decode(np.concatenate(text).tolist()).split()) == whole


def test_a_token_is_guessed_or_hidden_with_its_sentence_never_both(task: ContrastiveModelling):
    for _, batch in task.rows.held_out(ROWS).batches.epoch(0):
        document, labelled = batch["document_ids"], batch["labels"] != -100
        assert labelled.any()
        assert not labelled[document > 0].any()
        assert not labelled[batch["token_type_ids"] == 0].any()
        for row in range(len(document)):
            chosen = batch["segment_ids"][row][(batch["pair_ids"][row] > 0) & (document[row] == 0)]
            gone = torch.isin(batch["segment_ids"][row], chosen) & (batch["token_type_ids"][row] == 1)
            gone &= document[row] == 0
            assert (batch["input_ids"][row][gone] == task.rows.mask).all()
            assert not labelled[row][gone].any()


def test_the_loss_joins_both_and_metrics_say_each(task: ContrastiveModelling, model: Transformer):
    fitting = TaskWithData(task, Splits(ROWS, ROWS, None), seed=0)  # type: ignore[arg-type]
    batch = next(iter(fitting.batches(0, 0, 0, 1)))
    output = model(**{name: tensor for name, tensor in batch.items() if name != "pair_ids"})
    totals = task.metrics.totals(model, batch).tolist()
    metrics = task.metrics.values(totals, {})
    assert fitting.loss(model, batch).item() == pytest.approx(metrics["loss"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(
        0.8 * output.loss.item() + 0.2 * metrics["contrastive_loss"], rel=1e-5
    )
    assert totals[5] == (batch["pair_ids"] > 0).sum() / 2
    assert 0 <= metrics["contrastive_accuracy"] <= 1


def test_every_parameter_is_trained_by_the_joint_loss(task: ContrastiveModelling, model: Transformer):
    batch = next(iter(TaskWithData(task, Splits(ROWS, None, None), seed=0).batches(0, 0, 0, 1)))  # type: ignore[arg-type]
    task.objective.loss(model, batch).backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters()
    )


def test_a_batch_of_single_sentences_still_trains(task: ContrastiveModelling, model: Transformer):
    rows = [{"text": "one sentence and no more"}]
    batch = next(iter(TaskWithData(task, Splits(rows, None, None), seed=0).batches(0, 0, 0, 1)))  # type: ignore[arg-type]
    assert batch["pair_ids"].sum() == 0
    assert task.objective.loss(model, batch).isfinite()
    assert task.metrics.totals(model, batch)[3:].tolist() == [0, 0, 0]


def test_the_model_gets_the_number_of_global_tokens(task: ContrastiveModelling, model: Transformer):
    encoder = model.config.encoder
    assert encoder is not None
    assert isinstance(encoder.attention.mechanism, SoftmaxConfig)
    assert encoder.attention.mechanism.pattern == ETC(6, 4, hard_g2l=True)
    assert encoder.position == EtcLabelsConfig(global_tokens=6, max_distance=3)
    with pytest.raises(InputError, match="model: this task needs the pattern ETC; use etc-base"):
        task.adapt(model_config("encoder-tiny"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_tokens": 1}, "global_tokens: expected 2 or more, got 1"),
        ({"sentence_share": 1.0}, "sentence_share: expected a share in (0, 1), got 1.0"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"batch_tokens": 200}, "batch_tokens: expected row_length + global_tokens, 288, or more, got 200"),
    ],
)
def test_shares_temperatures_and_batches_out_of_range_are_refused(options: dict, message: str):
    with pytest.raises(InputError) as caught:
        ContrastiveModellingConfig(**options)
    assert message in str(caught.value)
