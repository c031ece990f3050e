"""ELECTRA's task: the pair's loss by its definition, what both share, and a run that keeps both."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import polyformer
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import Electra, ElectraConfig, TaskWithData
from polyformer.training.tasks.masked import ElectraOutput, GeneratorAndModel, generator_config

ROWS = [{"text": f"line {i} of a small text with words in it, and {i * 7} more"} for i in range(12)]


@pytest.fixture(scope="module")
def task() -> Electra:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    return ElectraConfig(row_length=64, batch_tokens=300).build(tokenizer)


def joined(task: Electra, **options: object) -> GeneratorAndModel:
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_attention_heads": 4, "dropout": 0.0, **options}
    return task.objective.training_module(Transformer(task.adapt(model_config("encoder-tiny", options))))


def first(task: Electra) -> dict[str, torch.Tensor]:
    return next(iter(TaskWithData(task, Splits(ROWS, None, None), seed=0).batches(0, 0, 0, 1)))  # type: ignore[arg-type]


def test_the_generator_is_as_deep_and_a_quarter_as_wide():
    config = generator_config(model_config("bert-base"), 0.25)
    assert config.encoder is not None
    assert config.hidden_size == 192
    assert config.embedding.size == 768
    assert config.encoder.num_hidden_layers == 12
    assert config.encoder.attention.num_attention_heads == 3
    assert config.encoder.feedforward.to_dict()["intermediate_size"] == 768
    small = generator_config(
        model_config("bert-base", {"num_attention_heads": 2, "num_key_value_heads": 2}), 0.1
    )
    assert (small.hidden_size, small.head.kind) == (384, "masked")


def test_every_hidden_token_is_the_mask(task: Electra):
    batch = first(task)
    hidden = batch["labels"] != -100
    assert (batch["input_ids"][hidden] == task.rows.masking.mask_id).all()
    share = hidden.sum() / batch["attention_mask"].sum()
    assert share.item() == pytest.approx(0.15, abs=0.02)


def test_the_loss_is_its_definition(task: Electra):
    """Worked again with plain sums, from the tokens that the pair drew."""
    pair, batch = joined(task).eval(), first(task)
    output = pair(**batch)
    read = output.input_ids
    text = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    real = batch["attention_mask"].bool()
    assert torch.equal(read == batch["input_ids"], batch["labels"] == -100), "only hidden ones change"
    changed = (read != text)[real].double()
    assert 0 < changed.sum() <= (batch["labels"] != -100).sum()
    places = {name: batch[name] for name in ("attention_mask", "document_ids", "position_ids")}
    guess = pair.generator(batch["input_ids"], **places).logits.log_softmax(-1)
    known = batch["labels"] != -100
    guessing = -guess[known].gather(1, batch["labels"][known, None]).mean()
    logits = pair.model(read, **places).logits[real]
    detecting = F.softplus(torch.where(changed == 1, -logits, logits)).mean()
    torch.testing.assert_close(output.loss, guessing + 50 * detecting, rtol=1e-5, atol=1e-5)
    metrics = task.metrics.values(task.metrics.totals(pair, batch).tolist(), {})
    assert metrics["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert metrics["detection_loss"] == pytest.approx(detecting.item(), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(((logits > 0) == (changed == 1)).double().mean().item())
    assert metrics["generator_accuracy"] == pytest.approx(
        (guess[known].argmax(-1) == batch["labels"][known]).double().mean().item()
    )


def test_no_gradient_flows_from_the_model_into_the_generator(task: Electra):
    pair, batch = joined(task), first(task)
    output: ElectraOutput = pair(**batch)
    (output.loss - output.generator_loss).backward()
    shared = {id(parameter) for parameter in pair.model.parameters()}
    own = [parameter for parameter in pair.generator.parameters() if id(parameter) not in shared]
    assert own
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in own)
    assert all(parameter.grad is not None for parameter in pair.model.parameters())


def test_both_share_their_embeddings_and_nothing_else(task: Electra):
    pair = joined(task, normed=True, type_vocab_size=2)
    shared = {name for name, _ in pair.model.named_parameters()} - {
        name.removeprefix("model.") for name, _ in pair.named_parameters() if name.startswith("model.")
    }
    expected = {
        "tokens.weight",
        "encoder_embedding.types.weight",
        "encoder_embedding.norm.weight",
        "encoder_embedding.norm.bias",
        "encoder.position.tables.0.weight",
    }
    assert shared == expected, "named under the generator, which comes first"
    before = pair.model.tokens.weight.detach().clone()
    pair(**first(task)).generator_loss.backward()
    torch.optim.SGD(pair.parameters(), lr=1.0).step()
    assert not torch.equal(pair.model.tokens.weight, before)
    assert pair.generator.tokens.weight is pair.model.tokens.weight


def test_held_out_text_is_corrupted_alike_every_time_and_training_text_anew(task: Electra):
    pair, batch = joined(task), first(task)
    assert torch.equal(pair.eval()(**batch).input_ids, pair(**batch).input_ids)
    torch.manual_seed(1)
    sampled, resampled = pair.train()(**batch).input_ids, pair(**batch).input_ids
    torch.manual_seed(1)
    assert torch.equal(pair(**batch).input_ids, sampled)
    assert not torch.equal(sampled, resampled)


def test_a_pair_learns(task: Electra):
    pair, batch = joined(task), first(task)
    optimizer = torch.optim.AdamW(pair.parameters(), lr=3e-3)
    before = task.metrics.values(task.metrics.totals(pair.eval(), batch).tolist(), {})
    for _ in range(40):
        optimizer.zero_grad()
        task.objective.loss(pair.train(), batch).backward()
        optimizer.step()
    after = task.metrics.values(task.metrics.totals(pair.eval(), batch).tolist(), {})
    assert after["generator_perplexity"] < before["generator_perplexity"] / 3
    assert after["detection_loss"] < before["detection_loss"]


def test_a_run_keeps_the_model_and_the_generator_and_resumes_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small text\n\n" for i in range(60)))
    out, data = tmp_path / "run", str(tmp_path / "text.txt")
    words = ["train", "--task.kind", "electra", "--model", "encoder-tiny", "--data", data, "--out", str(out)]
    words += ["--steps", "4", "--training.saving.checkpoint_every", "2", "--tokenizer.algorithm", "bytes"]
    words += ["--data.format", "paragraphs", "--data.validation_fraction", "0.2", "--device", "cpu"]
    assert main(words) == 0
    capsys.readouterr()
    model = polyformer.from_pretrained(out)
    assert model.config.head.kind == "detect"
    generator = polyformer.from_pretrained(out / "generator")
    assert torch.equal(generator.tokens.weight, model.tokens.weight)
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    cells = capsys.readouterr().out.strip().split("\n")[1].split()
    assert float(cells[1]) == pytest.approx(_recorded(out)["loss"], rel=1e-3)
    whole = [(out / name / "model.safetensors").read_bytes() for name in (".", "generator")]
    torch.manual_seed(99)  # of no account: the run seeds itself
    shutil.copy(out / "recipe.yaml", tmp_path / "same.yaml")
    assert main(["train", str(tmp_path / "same.yaml"), "--out", str(tmp_path / "same")]) == 0
    again = [(tmp_path / "same" / name / "model.safetensors").read_bytes() for name in (".", "generator")]
    assert again == whole
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    (out / "model.safetensors").unlink()
    assert main(["train", "--resume", str(out)]) == 0
    assert [(out / name / "model.safetensors").read_bytes() for name in (".", "generator")] == whole


def _recorded(out: Path) -> dict[str, float]:
    from polyformer.core.files import read_json

    return read_json(out / "run.json")["metrics"]["validation"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator_size": 0.0}, "generator_size: expected a share in (0, 1], got 0.0"),
        ({"detection_weight": 0.0}, "detection_weight: expected a number above 0, got 0.0"),
        ({"batch_tokens": 64}, "batch_tokens: expected row_length, 128, or more, got 64"),
    ],
)
def test_sizes_weights_and_batches_out_of_range_are_refused(options: dict, message: str):
    with pytest.raises(InputError) as caught:
        ElectraConfig(**options)
    assert message in str(caught.value)
