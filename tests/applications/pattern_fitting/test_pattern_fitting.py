"""Patterns for every head: their measured errors, the choice under a budget, and the fitted model."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import polyformer
from polyformer.applications.head_errors import CUE, SPAN, number_of_copies, query_runs, with_copies
from polyformer.applications.pattern_fitting import (
    candidates,
    choose,
    fit_pattern,
    head_errors,
    limit_options,
    pair_counts,
)
from polyformer.attention.functional.request import observed
from polyformer.attention.patterns import Full, Global, Pattern, PerHead, PerLayer, Strided, Window
from polyformer.core.errors import InputError
from polyformer.core.sequence.context import Context
from polyformer.models.architectures import Transformer
from polyformer.models.checkpoints import convert, from_pretrained
from polyformer.models.presets import create_model

LENGTH = 21
PATTERNS = Window(2), Window(3) | Global(2), Strided(4), Full()


def model_of(name: str, **options: object) -> Transformer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, **options}
    return create_model(name, **sizes, intermediate_size=48).eval()


def decoder() -> Transformer:
    return model_of("decoder-tiny", num_key_value_heads=2, position="rope")


def attentions(model: Transformer) -> list[Any]:
    return [layer.attention for layer in (model.decoder or model.encoder).layers]  # type: ignore[union-attr]


def texts(count: int, length: int = LENGTH) -> list[list[int]]:
    return torch.randint(30, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def allowed(pattern: Pattern, causal: bool, length: int = LENGTH) -> torch.Tensor:
    i, j = torch.arange(length).view(-1, 1), torch.arange(length)
    mask = pattern.mask_mod(Context(length, length))(torch.zeros(1), torch.zeros(1), i, j)
    return (mask & (j <= i) if causal else mask).expand(length, length)


def by_definition(model: Transformer, row: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return errors and lost mass [L, H, C] of one text, from dense matrices of all pairs.

    Copies weigh as much as the text before them.
    """
    outputs: list[torch.Tensor] = []
    causal, length = model.decoder is not None, len(row)
    text = with_copies(row, number_of_copies(length) if causal else 0)
    for attention in attentions(model):
        attention.mechanism.register_forward_hook(lambda m, a, y: outputs.append(y[0]))
    with observed() as requests:
        ids, labels = torch.tensor([text.ids]), torch.tensor([text.labels])
        if causal:
            loss = model(ids, labels=labels).loss * (labels >= 0).sum()  # type: ignore[operator]
        else:
            logits = model(ids).logits
            loss = (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).sum()
    errors, lost, counts = [], [], torch.ones(length)
    counts[text.start :] = text.start / max(1, length - text.start)
    for request, g in zip(requests, torch.autograd.grad(loss, outputs)):
        k, v = (x[0].repeat_interleave(request.groups, 0) for x in (request.k, request.v))
        scores = request.q[0] @ k.mT * request.scale
        weights = scores.masked_fill(~allowed(Full(), causal, length), -torch.inf).softmax(-1)
        for pattern in PATTERNS:
            kept = weights * allowed(pattern, causal, length)
            mass = kept.sum(-1)
            d = kept @ v / mass[..., None] - weights @ v
            squares = (g[0] * d).sum(-1) ** 2 + (g[0] ** 2).sum(-1) * (d**2).sum(-1) / d.shape[-1]
            errors.append((squares * counts).sum(-1))
            lost.append(((1 - mass) * counts).sum(-1) / counts.sum())
    shape = len(requests), len(PATTERNS), -1
    return tuple(torch.stack(x).view(shape).mT.detach().double() for x in (errors, lost))  # type: ignore


@pytest.mark.parametrize(("kind", "length"), [("decoder", LENGTH), ("encoder", LENGTH), ("decoder", 300)])
def test_errors_and_masses_equal_those_of_dense_matrices(kind: str, length: int):
    model = decoder() if kind == "decoder" else model_of("encoder-tiny", head="embed")
    rows = texts(2, length)
    measured = head_errors(model, rows, PATTERNS)
    expected = [by_definition(model, row) for row in rows]
    errors, lost = (sum(x) for x in zip(*expected))
    torch.testing.assert_close(measured.errors, errors, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(measured.lost, lost / 2, rtol=1e-4, atol=1e-6)
    causal = kind == "decoder"
    assert measured.costs.tolist() == [int(allowed(p, causal, length).sum()) for p in PATTERNS]


def test_a_text_ends_with_copies_of_spans_at_all_distances():
    row = list(range(1000))
    text = with_copies(row, number_of_copies(1000))
    assert text.ids[: text.start] == row[: text.start] == text.labels[: text.start]
    copies = [text.ids[i : i + SPAN] for i in range(text.start, 1000, SPAN)]
    firsts = sorted(span[0] for span in copies)
    assert len(copies) == 3
    assert all(span == row[span[0] : span[0] + SPAN] for span in copies)
    assert np.diff([0, *firsts, text.start]).max() < text.start / 2
    for i, span in zip(range(text.start, 1000, SPAN), copies):
        assert text.labels[i : i + SPAN] == [-100] * CUE + span[CUE:]
    assert with_copies(row[:200], number_of_copies(200)).ids == row[:200]


def test_the_measurement_repeats_bitwise_and_leaves_the_model_as_it_was():
    model = decoder().train()
    model.tokens.weight.requires_grad_(False)
    before = [(x.requires_grad, x.grad) for x in model.parameters()]
    first, second = (head_errors(model, texts(1, 300), candidates(300)) for _ in range(2))
    assert torch.equal(first.errors, second.errors)
    assert torch.equal(first.lost, second.lost)
    assert fit_pattern(first, 0.3).pattern == fit_pattern(second, 0.3).pattern
    assert [(x.requires_grad, x.grad) for x in model.parameters()] == before
    assert all(module.training for module in model.modules())
    assert not model.decoder.recompute  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_best_of_all(seed: int):
    generator = np.random.default_rng(seed)
    errors, costs = generator.random((4, 3)), np.sort(generator.integers(1, 30, 3))
    budget = int(generator.integers(4 * costs[0], 4 * costs[2]))
    within = [c for c in itertools.product(range(3), repeat=4) if costs[list(c)].sum() <= budget]
    best = min(errors[range(4), list(c)].sum() for c in within)
    chosen = choose(errors, costs, budget)
    assert costs[chosen].sum() <= budget
    assert errors[range(4), chosen].sum() == pytest.approx(best)


@pytest.mark.parametrize(("most", "budget"), [(1, 30), (2, 30), (2, 54)])
def test_layers_keep_their_best_options_within_the_budget(most: int, budget: int):
    errors = np.random.default_rng(most).random((2, 3, 4))
    costs = np.array([1, 3, 5, 9])
    limited = limit_options(errors, costs, budget, most)
    chosen = np.array(choose(limited.reshape(6, 4), costs, budget)).reshape(2, 3)
    assert costs[chosen].sum() <= budget
    kept = np.isfinite(limited)
    assert (kept.any(1).sum(-1) == most).all()
    assert (limited[kept] == errors[kept]).all()
    if budget == 54:  # all heads may have any option
        pairs = itertools.combinations(range(4), 2)
        best = np.min([errors[..., pair].min(-1).sum(-1) for pair in map(list, pairs)], axis=0)
        assert np.take_along_axis(errors, chosen[..., None], 2).sum() == pytest.approx(best.sum())


def test_a_local_head_gets_a_window_and_a_global_head_all_keys():
    model = model_of("decoder-tiny", num_hidden_layers=1, num_attention_heads=2, position="alibi")
    # Without products of queries and keys, ALiBi's slopes of 1/16 and 1/256 decide.
    torch.nn.init.zeros_(attentions(model)[0].query.weight)
    patterns = Window(64), Full()
    errors = head_errors(model, texts(1, 160), patterns)
    assert fit_pattern(errors, 0.9).pattern == PerHead(patterns)


@pytest.mark.parametrize("budget", [0.12, 0.3, 1.0])
def test_the_model_computes_at_most_the_budget(budget: float):
    model, rows = decoder(), texts(1, 64)
    fitted = fit_pattern(head_errors(model, rows, candidates(64)), budget)
    text = fitted.pattern.to_text()
    sparse, _ = convert(model, text)
    with observed() as requests:
        out = sparse(torch.tensor(rows)).logits
    pairs = [request.pattern.head_pattern(h) for request in requests for h in range(4)]  # type: ignore
    counted = int(pair_counts(pairs, Context(64, 64, causal=True)).sum())
    assert counted <= budget * 8 * 64 * 65 // 2
    assert fitted.share == pytest.approx(counted / (8 * 64 * 65 // 2))
    if budget == 1:
        assert text == "Full()"
        torch.testing.assert_close(out, model(torch.tensor(rows)).logits)
    else:
        assert isinstance(fitted.pattern, PerLayer)


def test_budgets_out_of_range_and_other_attentions_are_refused():
    errors = head_errors(decoder(), texts(1), PATTERNS)
    with pytest.raises(InputError, match="budget: expected at least"):
        fit_pattern(errors, 0.01)
    with pytest.raises(InputError, match="budget: expected a share"):
        fit_pattern(errors, 1.5)
    sparse, _ = convert(decoder(), "PerLayer([Full(), Window(4)])")
    with pytest.raises(InputError, match="layer 1 has another attention"):
        head_errors(sparse, texts(1), PATTERNS)
    with pytest.raises(InputError, match="got both"):
        head_errors(model_of("transformer-tiny"), texts(1), PATTERNS)


@pytest.mark.parametrize(("length", "start"), [(21, 21), (512, 512), (513, 513), (5000, 4488)])
def test_the_queries_of_the_runs_stand_for_the_whole_text(length: int, start: int):
    runs = query_runs(length, start)
    assert (runs[0].start, runs[-1].stop) == (0, length)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(runs))
    for some in ([run for run in runs if run.stop <= start], [run for run in runs if run.start >= start]):
        counted = sum(run.weight * (run.stop - run.start) for run in some)
        assert counted == pytest.approx(start if some else 0)
    assert sum(run.stop - run.start for run in runs if run.start >= start) == length - start


def test_a_fitted_text_is_taken_by_every_way_to_apply_it(tmp_path: Path):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 48}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    dense, rows = from_pretrained(tmp_path), texts(2, 64)
    text = fit_pattern(head_errors(dense, rows, candidates(64)), 0.3).pattern.to_text()
    assert "PerHead" in text
    ids = torch.tensor(rows)
    expected = polyformer.attach(theirs, text)(ids).logits
    assert not torch.allclose(expected, dense(ids).logits, atol=1e-3)
    for model in (from_pretrained(tmp_path, attention=text), convert(dense, text)[0]):
        torch.testing.assert_close(model(ids).logits, expected)
