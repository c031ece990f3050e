"""The effects of heads against ablations by hand, and the estimate against slopes and the exact effects."""

import copy
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import polyformer
from polyformer.applications.interventions import ablate, replacements, token_effects
from polyformer.cli.main import main
from polyformer.core.errors import InputError

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
}
ROWS = [torch.randint(0, 24, (rows, 9), generator=torch.Generator().manual_seed(rows)) for rows in (1, 2)]


@pytest.fixture(scope="module")
def trained() -> Any:
    """A decoder that has learned to repeat the first half of a row."""
    torch.manual_seed(0)
    model = polyformer.create_model("decoder-tiny", vocab_size=24, position="alibi", dropout=0.0, **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(100):
        half = torch.randint(0, 24, (32, 5))
        ids = torch.cat([half, half], 1)
        loss = F.cross_entropy(model(ids).logits[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.double().eval()


def loss_by_hand(model: Any, rows: list[Tensor], layer: int, head: int, mean: Tensor | float) -> Tensor:
    """The mean loss of all tokens, with the head's part of the output projection's input replaced."""

    def replaced(_: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
        heads = arguments[0].unflatten(-1, (4, 8)).clone()
        heads[..., head, :] = mean
        return (heads.flatten(-2),)

    handle = model.decoder.layers[layer].attention.output.register_forward_pre_hook(replaced)
    try:
        return loss_of(model, rows)
    finally:
        handle.remove()


def loss_of(model: Any, rows: list[Tensor]) -> Tensor:
    logits = torch.cat([model(ids).logits[:, :-1].flatten(0, 1) for ids in rows])
    return F.cross_entropy(logits, torch.cat([ids[:, 1:].flatten() for ids in rows]))


def outputs_by_hand(model: Any) -> list[Tensor]:
    """The outputs of the heads, [tokens, 4, 8] per layer."""
    values: list[list[Tensor]] = [[] for _ in model.decoder.layers]
    handles = [
        layer.attention.output.register_forward_pre_hook(
            lambda _, arguments, kept=kept: kept.append(arguments[0].unflatten(-1, (4, 8)).flatten(0, 1))
        )
        for layer, kept in zip(model.decoder.layers, values)
    ]
    for ids in ROWS:
        model(ids)
    for handle in handles:
        handle.remove()
    return [torch.cat(kept) for kept in values]


@pytest.mark.parametrize("by", ["mean", "zero"])
@torch.no_grad()
def test_effects_are_those_of_ablations_by_hand(trained: Any, by: Any):
    result = ablate(trained, ROWS, by)
    means = [each.mean(0) if by == "mean" else 0 * each[0] for each in outputs_by_hand(trained)]
    base = loss_of(trained, ROWS)
    expected = [
        [loss_by_hand(trained, ROWS, layer, head, means[layer][head]) - base for head in range(4)]
        for layer in range(3)
    ]
    torch.testing.assert_close(result.effects, torch.tensor(expected), rtol=1e-10, atol=1e-10)
    assert result.loss == pytest.approx(base.item(), rel=1e-12)
    assert result.ranking()[0][2] == result.effects.max() > 0.01
    assert trained.decoder.layer_range == range(3)


def test_the_estimate_is_the_gradient_times_the_change(trained: Any):
    result = ablate(trained, ROWS, estimate=True)
    outputs = outputs_by_hand(trained)
    step = 1e-6
    for layer, head in ((0, 1), (2, 3)):
        mean = outputs[layer].mean(0)[head]

        def moved(sign: float, layer: int = layer, head: int = head, mean: Tensor = mean) -> Tensor:
            with polyformer.trace(trained) as calls:
                calls.layer(layer).head(head).output.edit(lambda y: y + sign * step * (mean - y))
                return loss_of(trained, ROWS)

        with torch.no_grad():
            slope = (moved(1) - moved(-1)) / (2 * step)
        torch.testing.assert_close(result.effects[layer, head], slope, rtol=1e-5, atol=1e-8)


def test_the_estimate_ranks_heads_with_small_effects_like_the_exact_effects(trained: Any):
    model = copy.deepcopy(trained)
    for layer in model.decoder.layers:
        layer.attention.output.weight.data *= 0.1  # the error of first order falls with the square
    half = torch.randint(0, 24, (16, 5), generator=torch.Generator().manual_seed(3))
    rows = [torch.cat([half, half], 1)]
    exact, estimate = (ablate(model, rows, estimate=flag).effects.flatten() for flag in (False, True))
    ranks = torch.stack([effects.argsort().argsort().double() for effects in (exact, estimate)])
    assert torch.corrcoef(ranks)[0, 1] > 0.9


def test_a_model_of_transformers_has_the_effects_of_the_converted_model(tmp_path: Path):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=24, num_key_value_heads=2, **SIZES)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.save_pretrained(tmp_path)
    own, theirs = ablate(polyformer.from_pretrained(tmp_path), ROWS), ablate(llama, ROWS)
    torch.testing.assert_close(own.effects, theirs.effects, rtol=1e-4, atol=1e-6)


def test_effects_on_each_token_do_not_reach_earlier_tokens(trained: Any):
    ids = ROWS[0]
    means = replacements(trained, ROWS)
    losses, effects = token_effects(trained, ids, means)
    shorter = token_effects(trained, ids[:, :6], means)
    torch.testing.assert_close((losses[:, :5], effects[..., :5]), shorter)
    assert effects.shape == (3, 4, 1, 8)


def test_calls_of_other_threads_are_not_changed(trained: Any):
    """Each call gets what it would get without the ablation, in the mode that its model has."""
    dropping = copy.deepcopy(trained).train()
    plain, stop = trained(ROWS[1]).logits.detach(), threading.Event()

    def call() -> list[bool]:
        same = []
        with torch.no_grad():
            while not stop.is_set():
                logits = dropping(ROWS[1]).logits
                same.append(dropping.training and torch.allclose(logits, plain, rtol=1e-10, atol=1e-10))
        return same

    with ThreadPoolExecutor(2) as threads:
        plain_calls = [threads.submit(call) for _ in range(2)]
        try:
            during = ablate(dropping, ROWS).effects
        finally:
            stop.set()
    assert all(calls.result() and all(calls.result()) for calls in plain_calls)
    torch.testing.assert_close(during, ablate(trained, ROWS).effects)


def test_the_command_prints_and_writes_the_effects(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, text = tmp_path / "heads.svg", tmp_path / "a.txt"
    text.write_text("The sun rises in the east. " * 9)
    words = ["ablate", "decoder-tiny", "--text", str(text), "--length", "16", "--by", "zero", "--top", "3"]
    assert main([*words, "--out", str(file)]) == 0
    record = json.loads((tmp_path / "heads.json").read_text())
    first = record["effects"][0]
    output = capsys.readouterr().out
    assert f"loss {record['loss']:.4f} nats per token" in output
    assert f"{first['layer']} │    {first['head']} │" in output
    assert (record["by"], record["texts"], len(record["effects"])) == ("zero", 2, 8)
    assert "rise of the loss without the head" in file.read_text()


def test_models_without_a_next_token_are_refused():
    with pytest.raises(InputError, match="expected a causal language model, got 'Transformer'"):
        ablate(polyformer.create_model("encoder-tiny"), ROWS)
