"""Masked diffusion: what is masked, the loss by the definition, its bound for known distributions, runs."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polyformer
from polyformer import InputError
from polyformer.cli.main import main
from polyformer.core.files import read_json
from polyformer.data import Splits, Tokenizer, TokenizerConfig
from polyformer.data.rows.masking import mask_by_count, mask_by_rate
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.tasks import MaskedDiffusion, MaskedDiffusionConfig, TaskWithData
from polyformer.training.tasks.diffusion import diffusion_nats

ROWS = [{"text": f"line {i} of a small text with words in it, and {i * 7} more"} for i in range(6)]
TEXTS = np.array([-1, 0, 0, 0, -1, 1, 1, 1, 1, -1])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])


def tiny(tokenizer: Tokenizer, **options: Any) -> MaskedDiffusion:
    return MaskedDiffusionConfig(row_length=24, batch_tokens=100, **options).build(tokenizer)


def model_of(task: MaskedDiffusion) -> Transformer:
    torch.manual_seed(0)
    options = {"hidden_size": 24, "num_attention_heads": 3, "dropout": 0.0, "position": "rope"}
    return Transformer(task.adapt(model_config("encoder-tiny", options))).double().eval()


def first_batch(task: MaskedDiffusion, epoch: int = 0) -> dict[str, Tensor]:
    data: Any = TaskWithData(task, Splits(ROWS, None, None), seed=0)  # type: ignore[arg-type]
    return next(iter(data.batches(epoch, 0, 0, 1)))


@pytest.mark.parametrize("mask", [mask_by_rate, mask_by_count])
def test_the_weights_make_every_token_count_once(mask: Any):
    """E[weight of a token if it is masked] = 1, and 0 for tokens that are never masked."""
    ids, generator = np.arange(10) + 100, np.random.default_rng(0)
    rate = {"least": 0.01} if mask is mask_by_rate else {}
    draws = [mask(ids, TEXTS, generator, 7, **rate) for _ in range(4000)]
    for masked in draws[:50]:
        chosen = masked.labels != -100
        assert (masked.input_ids == np.where(chosen, 7, ids)).all()
        assert (masked.labels[chosen] == ids[chosen]).all()
        assert not chosen[TEXTS < 0].any()
        assert not masked.weights[TEXTS < 0].any()
        assert len({*masked.weights[TEXTS == 1]}) == 1, "the texts of a row have weights of their own"
    counted = np.stack([masked.weights * (masked.labels != -100) for masked in draws])
    error = counted.std(0) / len(draws) ** 0.5
    assert (
        np.abs(counted.mean(0) - (TEXTS >= 0)) <= 4 * error + 0.011
    ).all()  # rates below 0.01 are left out


def test_counts_are_uniform_and_weights_are_their_inverse():
    ids, generator = np.arange(10), np.random.default_rng(0)
    counts = np.zeros(4)
    for _ in range(2000):
        masked = mask_by_count(ids, TEXTS, generator, 7)
        count = int((masked.labels[TEXTS == 1] != -100).sum())
        assert masked.weights[5] == 4 / count
        counts[count - 1] += 1
    assert (np.abs(counts - 500) < 80).all()


def test_a_text_without_tokens_to_mask_stays():
    for ids in (np.zeros(0, np.int64), np.arange(3)):
        for mask in (mask_by_rate, mask_by_count):
            masked = mask(ids, np.full(len(ids), -1), np.random.default_rng(0), 7)
            assert (masked.input_ids == ids).all()
            assert not masked.weights.any()


@pytest.mark.parametrize("packed", [True, False])
def test_the_loss_is_the_definition(tokenizer: Tokenizer, packed: bool):
    """Equation 3, text by text: each masked token's -log p, divided by the rate, over all tokens."""
    task = tiny(tokenizer, packed=packed)
    batch, model = first_batch(task), model_of(task)
    documents = batch.get("document_ids", torch.zeros_like(batch["input_ids"]))
    real = batch.get("attention_mask", torch.ones_like(documents)).bool()
    nats, tokens = 0.0, 0
    for row in range(len(documents)):
        for number in documents[row][real[row]].unique():
            own = (documents[row] == number) & real[row]
            ids, labels = batch["input_ids"][row, own], batch["labels"][row, own]
            logits = model(ids[None]).logits[0]
            weights = {*batch["label_weights"][row, own].tolist()} - {0.0}
            assert len(weights) <= 1, "one rate for the text"
            masked = labels != -100
            assert (ids[masked] == tokenizer.mask_id).all()
            nats += sum(weights) * F.cross_entropy(logits[masked], labels[masked], reduction="sum").item()
            tokens += int((torch.where(masked, labels, ids) != tokenizer.bos_id).sum())
    assert task.objective.weight(batch) == tokens
    assert task.objective.loss(model, batch).item() == pytest.approx(nats / tokens, rel=1e-5)
    assert not torch.equal(first_batch(task, 1)["labels"], batch["labels"]), "masks are new in every epoch"


LETTERS, LENGTH, MASK = 3, 3, 3


class TableModel(nn.Module):
    """A model of all texts of LENGTH letters: the exact conditionals of a joint distribution, to a power."""

    def __init__(self, joint: Tensor, power: float = 1.0):
        super().__init__()
        self.joint, self.power = joint, power

    def forward(self, input_ids: Tensor) -> Any:
        logits = torch.full((*input_ids.shape, LETTERS + 1), -torch.inf, dtype=torch.double)
        for row, ids in enumerate(input_ids.tolist()):
            for place in range(LENGTH):
                index = [slice(None) if i == MASK or k == place else i for k, i in enumerate(ids)]
                table = self.joint[tuple(index)]
                axis = sum(isinstance(part, slice) for part in index[:place])
                others = [k for k in range(table.dim()) if k != axis]
                logits[row, place, :LETTERS] = self.power * (table.sum(others) if others else table).log()
        return SimpleNamespace(logits=logits)


def nats_of(model: nn.Module, text: tuple[int, ...], masked: tuple[int, ...]) -> float:
    """-log p summed over the masked tokens of a text."""
    ids = torch.tensor([[MASK if i in masked else letter for i, letter in enumerate(text)]])
    labels = torch.tensor([[letter if i in masked else -100 for i, letter in enumerate(text)]])
    return diffusion_nats(model(ids).logits, labels, torch.ones(1, LENGTH)).item()


def any_order(model: nn.Module, text: tuple[int, ...]) -> float:
    """The mean over all orders of -log p of the text, token by token in that order."""
    orders = [*itertools.permutations(range(LENGTH))]
    total = 0.0
    for order in orders:
        for step, place in enumerate(order):
            hidden = order[step:]
            ids = torch.tensor([[MASK if i in hidden else letter for i, letter in enumerate(text)]])
            total -= model(ids).logits.log_softmax(-1)[0, place, text[place]].item()
    return total / len(orders)


def bound(model: nn.Module, text: tuple[int, ...]) -> float:
    """The expectation of the loss, the integral over t of t^(m - 1) (1 - t)^(L - m) for each set of m."""
    total = 0.0
    for count in range(1, LENGTH + 1):
        weight = math.factorial(count - 1) * math.factorial(LENGTH - count) / math.factorial(LENGTH)
        for masked in itertools.combinations(range(LENGTH), count):
            total += weight * nats_of(model, text, masked)
    return total


def test_the_bound_of_an_enumerable_distribution():
    """The expectation is the mean over all orders: the likelihood of exact conditionals, more for others."""
    torch.manual_seed(0)
    joint = torch.rand(LETTERS, LETTERS, LETTERS, dtype=torch.double) ** 2
    joint /= joint.sum()
    texts = [*itertools.product(range(LETTERS), repeat=LENGTH)]
    exact, wrong = TableModel(joint), TableModel(joint, power=0.5)
    for text in texts[::4]:
        assert bound(exact, text) == pytest.approx(-joint[text].log().item(), rel=1e-6)
        assert bound(wrong, text) == pytest.approx(any_order(wrong, text), rel=1e-6)
    entropy = -(joint * joint.log()).sum().item()
    assert sum(joint[text].item() * bound(wrong, text) for text in texts) > entropy + 0.01


@pytest.mark.parametrize("mask", [mask_by_rate, mask_by_count])
def test_the_sampled_loss_has_the_expectation_of_the_bound(mask: Any):
    torch.manual_seed(1)
    joint = torch.rand(LETTERS, LETTERS, LETTERS, dtype=torch.double)
    model, text, generator = TableModel(joint / joint.sum(), 0.7), (2, 0, 1), np.random.default_rng(0)
    subsets = [s for count in range(LENGTH + 1) for s in itertools.combinations(range(LENGTH), count)]
    known = {subset: nats_of(model, text, subset) for subset in subsets}
    values = []
    for _ in range(4000):
        masked = mask(np.array(text), np.zeros(LENGTH, np.int64), generator, MASK)
        chosen = tuple(np.flatnonzero(masked.labels != -100).tolist())
        values.append(masked.weights[0] * known[chosen])
    error = np.std(values) / len(values) ** 0.5
    assert abs(np.mean(values) - bound(model, text)) < 4 * error


def test_evaluation_counts_all_tokens_and_repeats_itself(tokenizer: Tokenizer):
    task = tiny(tokenizer, samples=24)
    model, held = model_of(task), task.rows.held_out(ROWS)
    metrics = task.metrics.measure(model, held)
    assert metrics == task.metrics.measure(model, held)
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    text = sum(len(row["text"].encode()) for row in ROWS)
    assert metrics["bits_per_byte"] == pytest.approx(
        metrics["loss"] * (text + len(ROWS)) / math.log(2) / text, rel=1e-6
    )
    other = tiny(tokenizer, samples=23).metrics.measure(model, held)
    assert 0 < abs(other["loss"] - metrics["loss"]) < metrics["standard_error"]


def test_the_standard_error_is_of_the_masks():
    """From the spread of a row's samples: 2 nats in one row and none in the other, over 5 tokens."""
    task = MaskedDiffusionConfig(samples=2).build(Tokenizer.train(TokenizerConfig(algorithm="bytes"), []))
    metrics = task.metrics.values([10.0, 1.0, 5.0], {})
    assert metrics == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2)), "standard_error": 0.2}


def test_a_row_of_blocks_has_a_clean_copy_of_each_document(tokenizer: Tokenizer):
    task = tiny(tokenizer, block_size=5)
    row = {
        "input_ids": np.array([tokenizer.bos_id, 1, 2, 3, 4, 5, 6, tokenizer.bos_id, 8, 0]),
        "document_ids": np.array([0] * 7 + [1] * 2 + [2]),
        "position_ids": np.array([*range(7), 0, 1, 0]),
        "attention_mask": np.array([1] * 9 + [0]),
    }
    noised = task.rows.by_rate(row, np.random.default_rng(0))
    assert noised["segment_ids"].tolist() == [1] * 7 + [0] * 7 + [1] * 2 + [0] * 2
    assert noised["document_ids"].tolist() == [0] * 14 + [1] * 4
    assert noised["position_ids"].tolist() == [*range(7), *range(7), 0, 1, 0, 1]
    clean = noised["segment_ids"] == 0
    assert noised["input_ids"][clean].tolist() == row["input_ids"][:9].tolist()
    assert (noised["labels"][clean] == -100).all()
    assert not noised["label_weights"][clean].any()
    weights = noised["label_weights"][:7]
    assert weights[0] == 0, "<bos> is never masked"
    assert len({*weights[1:5]}) == len({*weights[5:7]}) == 1
    assert weights[1] != weights[5], "a rate for each block"


@pytest.mark.parametrize("packed", [True, False])
def test_a_pass_over_both_copies_is_a_pass_for_each_block(tokenizer: Tokenizer, packed: bool):
    """Each block is predicted from itself and the clean blocks before it, as the model writes."""
    task = tiny(tokenizer, block_size=5, packed=packed)
    batch, model = first_batch(task), model_of(task)
    documents = batch.get("document_ids", torch.zeros_like(batch["input_ids"]))
    real = batch.get("attention_mask", torch.ones_like(documents)).bool()
    nats = 0.0
    for row in range(len(documents)):
        for number in documents[row][real[row]].unique():
            own = (documents[row] == number) & real[row]
            copies = {
                flag: {name: x[row, own & (batch["segment_ids"][row] == flag)] for name, x in batch.items()}
                for flag in (0, 1)
            }
            noised, clean = copies[1], copies[0]["input_ids"]
            for start in range(0, len(clean), 5):
                block = slice(start, start + 5)
                ids = torch.cat([clean[:start], noised["input_ids"][block]])
                labels, weights = noised["labels"][None, block], noised["label_weights"][None, block]
                nats += diffusion_nats(model(ids[None]).logits[:, start:], labels, weights).item()
    expected = nats / task.objective.weight(batch)
    assert task.objective.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)


def test_blocks_of_one_token_are_an_autoregressive_model(tokenizer: Tokenizer):
    """Every token is masked alone, after its clean past: the bound is the likelihood, without an error."""
    task = tiny(tokenizer, block_size=1, packed=False)
    model, held = model_of(task), task.rows.held_out(ROWS[:2])
    nats = tokens = 0.0
    for row in task.rows.prepare_held_out(ROWS[:2]):
        ids = torch.as_tensor(row["input_ids"]).long()
        for place in range(len(ids)):
            if ids[place] != tokenizer.bos_id:
                read = torch.cat([ids[:place], torch.tensor([tokenizer.mask_id])])
                nats -= model(read[None]).logits[0, -1].log_softmax(-1)[ids[place]].item()
                tokens += 1
    metrics = task.metrics.measure(model, held)
    assert metrics["standard_error"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["loss"] == pytest.approx(nats / tokens, rel=1e-6)


def test_models_that_do_not_fit_are_refused(tokenizer: Tokenizer):
    blocks = model_config("encoder-tiny", {"attention": "BlockDiffusion(4)"})
    with pytest.raises(InputError, match=r"task\.block_size: the model's attention has blocks"):
        tiny(tokenizer).adapt(blocks)
    assert tiny(tokenizer, block_size=4).adapt(blocks).special.mask == tokenizer.mask_id
    with pytest.raises(InputError, match=r"blocks of 5 tokens need the attention BlockDiffusion\(size=5\)"):
        tiny(tokenizer, block_size=5).adapt(blocks)
    with pytest.raises(InputError, match="model: this task needs an encoder model"):
        tiny(tokenizer).adapt(model_config("decoder-tiny"))


def test_samples_are_of_masked_diffusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n\n" for i in range(60)))
    words = ["--data", str(tmp_path / "text.txt"), "--data.format", "paragraphs", "--device", "cpu"]
    words += ["--task.kind", "mlm", "--model", "encoder-tiny", "--tokenizer.algorithm", "bytes"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--steps", "1"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--samples", "3"]) != 0
    assert "--samples: requires a run of the task 'masked_diffusion'" in capsys.readouterr().err


@pytest.mark.parametrize("blocks", [[], ["--task.block_size", "4"]], ids=["whole", "blocks"])
def test_a_run_is_resumed_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocks: list[str]
):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a small text\n\n" for i in range(60)))
    out, data = tmp_path / "run", str(tmp_path / "text.txt")
    words = ["--task.kind", "masked_diffusion", "--model", "encoder-tiny", "--model.position", "rope"]
    words += ["--data", data, "--tokenizer.algorithm", "bytes", "--task.row_length", "32", *blocks]
    words += ["--data.format", "paragraphs", "--data.validation_fraction", "0.2", "--device", "cpu"]
    assert main(["train", *words, "--out", str(out), "--steps", "1"]) == 0
    assert main(["train", "--resume", str(out), "--steps", "2"]) == 0
    assert main(["train", *words, "--out", str(tmp_path / "once"), "--steps", "2"]) == 0
    resumed, once = (polyformer.from_pretrained(folder).state_dict() for folder in (out, tmp_path / "once"))
    for name, weight in once.items():
        torch.testing.assert_close(resumed[name], weight)
    capsys.readouterr()
    assert main(["evaluate", str(out), "--device", "cpu"]) == 0
    header, cells = (line.split() for line in capsys.readouterr().out.strip().split("\n")[:2])
    recorded = read_json(out / "run.json")["metrics"]["validation"]
    assert "standard_error" in recorded
    assert float(cells[1]) == pytest.approx(recorded["loss"], rel=1e-3), header
    assert main(["evaluate", str(out), "--device", "cpu", "--samples", "36"]) == 0
    more = capsys.readouterr().out.strip().split("\n")[1].split()
    # Nine times as many samples have a third of the error, whose estimate from few rows varies.
    assert float(more[-1]) < 0.6 * float(cells[-1])
    asked = ["--max-new-tokens", "9", "--denoising-steps", "5", "--device", "cpu"]
    assert main(["generate", str(out), "--prompt", "line", *asked]) == 0
    text = capsys.readouterr().out
    assert text.startswith("line")
    loaded = polyformer.load(out, device="cpu")
    assert loaded.generate("line", max_new_tokens=9, denoising_steps=5) == text.removesuffix("\n")
    sampled = [*asked, "--seed", "1", "--remasking", "random"]
    assert main(["generate", str(out), "--prompt", "line", *sampled]) == 0
    assert capsys.readouterr().out != text
