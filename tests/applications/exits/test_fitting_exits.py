"""Exits in closed form: beside least squares in float64, and what they change."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyformer.applications import exit_fitting
from polyformer.applications.exit_fitting import RIDGES, NormalEquations, fit_exits
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data import TokenizerConfig, build_tokenizer
from polyformer.models.architectures import Transformer, load_pretrained
from polyformer.models.presets import create_model
from polyformer.nn.depth import recorded_depths, recorded_states
from polyformer.nn.depth.exits import Exits, set_threshold
from polyformer.nn.depth.exits.rules import Shortlist

SIZE, VOCAB = 24, 260


def model(depth: str = "exits(translation=linear, rule=shortlist(tokens=16))") -> Transformer:
    """A decoder of bytes, random, whose layers change much."""
    torch.manual_seed(0)
    sizes = {"hidden_size": SIZE, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 3}
    result = create_model("decoder-tiny", vocab_size=VOCAB, depth=depth, dropout=0.0, **sizes).eval()
    assert result.decoder is not None
    with torch.no_grad():
        for parameter in result.decoder.layers.parameters():
            parameter.mul_(2.0)
    return result


def exits(of: Transformer) -> Exits:
    assert of.decoder is not None
    assert isinstance(of.decoder.depth, Exits)
    return of.decoder.depth


def rows(count: int = 60, length: int = 32) -> list[list[int]]:
    return torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(1)).tolist()


def states(of: Transformer, ids: list[list[int]]) -> list[Tensor]:
    """[N, E] after each exit's layer and after the last, in float64."""
    with torch.no_grad(), recorded_states() as records:
        of(torch.tensor(ids))
    return [state.flatten(0, 1).double() for state in records[0]]


@pytest.mark.parametrize("ridge", [0.0, 1e-2])
def test_the_normal_equations_give_least_squares(ridge: float):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(90, 7, generator=generator, dtype=torch.float64)
    y = torch.randn(90, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(90, generator=generator, dtype=torch.float64)
    equations = NormalEquations(7, 5)
    for start in (0, 40):
        part = slice(start, start + 40 + start)
        equations.add(x[part], y[part], weights[part])
    root = weights.sqrt().unsqueeze(1)
    x, y, ones = root * x, root * y, root
    penalty = (ridge * x.square().sum() / 7) ** 0.5  # as rows of their own, without the bias
    above = torch.cat([torch.cat([x, ones], 1), torch.eye(8, dtype=torch.float64)[:7] * penalty])
    below = torch.cat([y, torch.zeros(7, 5, dtype=torch.float64)])
    right = torch.linalg.lstsq(above, below).solution
    torch.testing.assert_close(equations.solved([ridge])[0], right)


def test_too_few_rows_have_the_solution_of_least_norm():
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x @ torch.ones(9, 2, dtype=torch.float64)
    equations = NormalEquations(9, 2)
    equations.add(x, y, torch.ones(4))
    a = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0), driver="gelsd").solution
    right = torch.cat([a, y.mean(0, keepdim=True) - x.mean(0, keepdim=True) @ a])
    torch.testing.assert_close(equations.solved([0.0])[0], right)


def test_an_exit_is_the_regression_of_the_end_on_its_state():
    of, text = model(), rows()
    held_out = [n for n in range(len(text)) if n % 10 == 0]
    *before, end = states(of, [row for n, row in enumerate(text) if n not in held_out])
    fitted = fit_exits(of, text)
    for number, (h, fit) in enumerate(zip(before, fitted)):
        assert fit.layer == number + 1
        assert fit.ridge in RIDGES
        size = end.square().mean(1, keepdim=True).sqrt()
        x, y = torch.cat([h, torch.ones(len(h), 1, dtype=torch.float64)], 1) / size, (end - h) / size
        penalty = torch.full((SIZE + 1,), float(fit.ridge * (h / size).square().sum() / SIZE)).double()
        penalty[-1] = 0
        right = torch.linalg.lstsq(x.T @ x + penalty.diag(), x.T @ y).solution
        own = exits(of).exits[number].map
        torch.testing.assert_close(own.weight, right[:-1].T.float())
        torch.testing.assert_close(own.bias, right[-1].float())


@torch.no_grad()
def test_the_ridge_is_the_one_that_predicts_best_on_rows_held_out(monkeypatch: pytest.MonkeyPatch):
    text = rows(20)
    held_out = torch.tensor([row for n, row in enumerate(text) if n % 10 == 0])
    tried = {}
    for ridge in (1e-6, 1e-2, 10.0):
        monkeypatch.setattr(exit_fitting, "RIDGES", (ridge,))
        of = model()
        (fit, _) = fit_exits(of, text)
        end = of(held_out).logits.log_softmax(-1)
        set_threshold(of, [0.0, 1.0])
        own = of(held_out).logits.log_softmax(-1)
        tried[ridge] = fit.divergence
        assert fit.divergence == pytest.approx(float((end.exp() * (end - own)).sum(-1).mean()), rel=1e-3)
    monkeypatch.setattr(exit_fitting, "RIDGES", tuple(tried))
    assert fit_exits(model(), text)[0].ridge == min(tried, key=lambda ridge: tried[ridge])


@torch.no_grad()
def test_exits_agree_more_with_the_end():
    of, text, other = model(), rows(), torch.tensor(rows(4, 31))
    end = of(other).logits.log_softmax(-1)

    def divergence(layer: int) -> float:
        set_threshold(of, [0.0 if exit == layer else 1.0 for exit in (1, 2)])
        own = of(other).logits.log_softmax(-1)
        return float((end.exp() * (end - own)).sum(-1).mean())

    before = [divergence(layer) for layer in (1, 2)]
    fit_exits(of, text)
    after = [divergence(layer) for layer in (1, 2)]
    assert all(new < 0.8 * old for old, new in zip(before, after)), (before, after)


@torch.no_grad()
def test_a_shortlist_reads_the_rows_of_the_likeliest_tokens():
    of, text = model(), rows()
    fitted = torch.tensor([row for n, row in enumerate(text) if n % 10])
    counts = torch.bincount(of(fitted).logits.argmax(-1).flatten(), minlength=VOCAB)
    fit_exits(of, text)
    rule = exits(of).rule
    assert isinstance(rule, Shortlist)
    best = counts.topk(16)
    unit = of.predictions(torch.eye(SIZE)[None])[0] - of.predictions(torch.zeros(1, 1, SIZE))[0]
    places = [(rule.rows - unit[:, token]).norm(dim=1).argmin() for token in best.indices]
    assert sorted(int(place) for place in places) == list(range(16))
    hidden = torch.randn(3, SIZE)
    logits = hidden @ unit[:, best.indices] + of.predictions(torch.zeros(1, 1, SIZE))[0, 0, best.indices]
    first, second = logits.softmax(-1).sort(descending=True).values[:, :2].T
    from polyformer.nn.depth.exits.rules import Candidates

    own = rule.confidence(Candidates(0, hidden[None], hidden[None], hidden[None], None))
    torch.testing.assert_close(own, first - second)


@torch.no_grad()
def test_before_it_is_filled_a_shortlist_trusts_nothing():
    of = model()
    set_threshold(of, 0.01)
    with recorded_depths() as depths:
        of(torch.tensor(rows(2)))
    assert depths[0].unique().tolist() == [3]


def test_the_command_fits_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    model("fixed").save_pretrained(folder)
    build_tokenizer(TokenizerConfig(algorithm="bytes"), []).save(folder)
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 40)
    depth = ["--depth", "exits(layers=[1], translation=linear, rule=shortlist(tokens=8))"]
    call = ["convert", str(folder), str(tmp_path / "out"), *depth, "--fit", str(text), "--fit-tokens", "1024"]
    assert main(call) == 0, capsys.readouterr().err
    assert "on held-out rows" in capsys.readouterr().out
    loaded = load_pretrained(tmp_path / "out")
    assert bool(exits(loaded).rule.rows.any())
    assert bool(exits(loaded).exits[0].map.weight.any())
    for wrong, message in (
        (["--fit-tokens", "3"], "--fit-tokens: expected 512"),
        (["--depth", "exits"], "no parameters to fit"),
        (["--depth", "fixed"], "expected a decoder-only model with exits"),
    ):
        assert main([*call[:2], str(tmp_path / "other"), *call[3:], *wrong]) == 2
        assert message in capsys.readouterr().err


def test_a_row_must_be_held_out():
    with pytest.raises(InputError, match="at least two rows"):
        fit_exits(model(), rows(1))
