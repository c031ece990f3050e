"""The task of permuted language modelling: its orders, its loss by the definition, and a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import polyformer
from polyformer.cli.main import main
from polyformer.core.files import read_json
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer, TwoStreams
from polyformer.models.presets import model_config
from polyformer.training.tasks import PermutedModelling, PermutedModellingConfig, TaskWithData

ROWS = [{"text": f"line {i} of a small text with words in it, and {i * 7} more"} for i in range(12)]


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "apart"])
def task(request: pytest.FixtureRequest) -> PermutedModelling:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    return PermutedModellingConfig(row_length=64, batch_tokens=300, packed=request.param).build(tokenizer)


def first(task: PermutedModelling, epoch: int = 0) -> dict[str, torch.Tensor]:
    data: Any = TaskWithData(task, Splits(ROWS, None, None), seed=0)  # type: ignore[arg-type]
    return next(iter(data.batches(epoch, 0, 0, 1)))


def module(task: PermutedModelling) -> Any:
    torch.manual_seed(0)
    options = {"hidden_size": 24, "num_attention_heads": 3, "dropout": 0.0, "position": "xlnet"}
    return task.objective.training_module(
        Transformer(task.adapt(model_config("encoder-tiny", options)))
    ).eval()


def test_a_sixth_of_the_tokens_has_ranks_in_a_random_order(task: PermutedModelling):
    batch = first(task)
    ranks, labels = batch["ranks"], batch["labels"]
    assert torch.equal(ranks > 0, labels != -100)
    assert torch.equal(labels[ranks > 0], batch["input_ids"][ranks > 0]), "no token is masked"
    for row in range(len(ranks)):
        own = ranks[row][ranks[row] > 0]
        assert own.sort().values.tolist() == [*range(1, len(own) + 1)]
        ordinary = torch.isin(batch["input_ids"][row], torch.as_tensor(task.tokenizer.ordinary_ids)).sum()
        assert len(own) == max(1, round(ordinary.item() / 6))
    assert any(row[row > 0].diff().lt(0).any() for row in ranks), "an order of its own"
    later = first(task, 1)
    assert later["ranks"].shape != ranks.shape or not torch.equal(later["ranks"], ranks)


def test_the_loss_is_of_predictions_from_tokens_of_lower_rank(task: PermutedModelling):
    """A token of the highest rank changes no prediction of the row but those after it: of none."""
    pair, batch = module(task), first(task)
    assert isinstance(pair, TwoStreams)
    output = pair(**batch)
    chosen = batch["labels"] != -100
    expected = F.cross_entropy(output.logits[chosen], batch["labels"][chosen])
    torch.testing.assert_close(output.loss, expected)
    last = batch["ranks"] == batch["ranks"].amax(1, keepdim=True)
    ids = torch.where(last, (batch["input_ids"] + 1) % 200, batch["input_ids"])
    changed = pair(**{**batch, "input_ids": ids}).logits
    torch.testing.assert_close(changed[chosen], output.logits[chosen])
    metrics = task.metrics.values(task.metrics.totals(pair, batch).tolist(), {})
    assert metrics["loss"] == pytest.approx(output.loss.item(), rel=1e-5)


def test_a_run_keeps_the_encoder_and_is_evaluated_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small text\n\n" for i in range(60)))
    out, data = tmp_path / "run", str(tmp_path / "text.txt")
    words = ["train", "--task.kind", "permuted_lm", "--model", "encoder-tiny", "--model.position", "xlnet"]
    words += ["--data", data, "--out", str(out), "--steps", "2", "--tokenizer.algorithm", "bytes"]
    words += ["--data.format", "paragraphs", "--data.validation_fraction", "0.2", "--device", "cpu"]
    assert main(words) == 0
    capsys.readouterr()
    model = polyformer.from_pretrained(out)
    assert model.config.head.kind == "language_model"
    assert model.encoder is not None
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    cells = capsys.readouterr().out.strip().split("\n")[1].split()
    recorded = read_json(out / "run.json")["metrics"]["validation"]["loss"]
    assert float(cells[1]) == pytest.approx(recorded, rel=1e-3)
