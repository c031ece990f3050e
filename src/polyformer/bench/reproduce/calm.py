"""The claim that exits by confidence are worth more than a smaller depth, fixed beforehand (Schuster et al.
2022, CALM, sections 5 and 6, figure 4), for a checkpoint whose exits were fitted.

The beginnings of held-out texts are continued greedily by the whole model, by its rule at several thresholds,
and with all tokens leaving after one and the same layer. Of every way: the layers that a written token takes,
consistency (the ROUGE-L of what is written beside what the whole model writes), ROUGE-L beside how the texts
really go on, the perplexity of those texts, read in one pass, and the seconds of everything.

Consistency of the rule at any number of layers is read off the line through its thresholds and the whole
model. The claim holds where that line lies above the consistency of every fixed exit whose layers lie between
those of the lowest threshold and the whole model, and there is one at least.

Deviations: a decoder of language in place of T5, whose exits were fitted to its frozen layers in place of
trained with them; layers in place of FLOPs.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.bench.claims import KeptFigures, fields_of, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.calibration.calibrate import exits_of
from polyformer.calibration.similarity import RougeL
from polyformer.calibration.texts import ROWS, Write, continuing, written
from polyformer.checkpoints import from_pretrained
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data import DataConfig, read
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.depth import whole_depth
from polyformer.depth.exits import Exits
from polyformer.model import Transformer
from polyformer.recipes.find import with_data
from polyformer.tasks.metrics import exp
from polyformer.training.config import at_least

WHOLE = "whole"
CHARACTERS = 32
"""Read of the text for each token that is needed: few words are longer."""


EXPERIMENT = Experiment(
    sources={"data": "wikitext2", "model": "exits"},
    quick={"texts": 1, "prompt": 8, "new_tokens": 4, "thresholds": (0.5,)},
    claims=(
        Claim(
            name="calm",
            says="exits by confidence are worth more than a smaller depth, fixed beforehand",
            paper="Schuster et al. 2022 (CALM)",
            section="sections 5 and 6, figure 4",
            published="T5 on summaries, questions and translation: softmax exits keep more of the full "
            "model's quality than static depths",
            measured="agreement with the whole model by layers a token, exits by confidence beside one "
            "fixed exit",
            scale="SmolLM2-135M with exits fitted in closed form, 48 texts of 32 + 16 tokens",
            rule="the line through the thresholds lies above every fixed exit that it spans, and "
            "spans one at least",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalmClaim(Config):
    """The checkpoint, the text and sizes; a second call goes on with what OUT holds."""

    model: str  # a checkpoint with exits, as of `polyformer convert --depth exits(...) --fit`
    data: str  # WikiText-2's directory, of which valid.txt[.gz] is read, or the file of a text
    texts: int = 64
    prompt: int = 32  # tokens of each
    new_tokens: int = 32
    thresholds: tuple[float, ...] = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    out: str = "runs/calm"

    def __post_init__(self) -> None:
        at_least(1, texts=self.texts, prompt=self.prompt, new_tokens=self.new_tokens)
        if not self.thresholds or not all(0.0 <= value <= 1.0 for value in self.thresholds):
            raise InputError(f"thresholds: expected confidences from 0 to 1, got {list(self.thresholds)}")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way to write: layers a token, agreement with the whole model, ROUGE-L beside the references, their
    perplexity, and the seconds of writing."""

    layers: float
    consistency: float
    references: float
    perplexity: float
    seconds: float


Results = dict[str, Measured]


def run(config: CalmClaim) -> Results:
    """Measure all ways; write OUT/calm.csv and .png, print a table and the verdict."""
    model = from_pretrained(config.model)
    exits_of(model)
    assert model.decoder is not None
    assert isinstance(model.decoder.depth, Exits)
    figures = Figures(config, model)
    figures.measure(WHOLE, None)
    for threshold in config.thresholds:
        figures.measure(f"threshold {threshold:g}", threshold)
    layers = model.decoder.depth.layers[:-1]
    for layer in layers:
        figures.measure(f"all after layer {layer}", [float(layer != exit) for exit in layers])
    results, folder = figures.results, Path(config.out)
    rows = ((name, *dataclasses.astuple(value)) for name, value in results.items())
    write_csv(folder / "calm.csv", ("way", *fields_of(Measured)), rows)
    curves = {"by confidence": curve(results), "one depth for all": fixed(results)}
    line_plot(folder / "calm.png", curves, "layers a token", "consistency with the whole model")
    conclude(EXPERIMENT, config, [verdict(results)])
    return results


class Figures:
    """What was measured, kept in OUT/figures.json as it comes.

    Raises `InputError` for a file of other settings.
    """

    def __init__(self, config: CalmClaim, model: Transformer):
        self.model = model
        self.rows = held_out(config)
        self.write, self.references = writing(config, self.rows)
        self.similarity, self.prompt, self.warm = RougeL(), config.prompt, False
        settings = {**config.to_dict(), "out": None, "thresholds": None}
        self.kept = KeptFigures(Path(config.out) / "figures.json", settings)
        self.whole: list[str] = self.kept.stored.get("whole", [])
        stored = self.kept.stored.get("results", {}).items()
        self.results: Results = {name: Measured(**values) for name, values in stored}

    def measure(self, name: str, threshold: float | Sequence[float] | None) -> None:
        """Write and read with exits at `threshold`, or one for each exit, or without, if not done yet."""
        if name not in self.results:
            if not self.warm:  # what a first generation makes ready is no way's own time
                continuing(self.rows[:1].tolist(), self.prompt, str)[0](self.model)
                self.warm = True
            result = written(self.model, self.write, threshold)
            self.whole = self.whole or result.texts
            self.results[name] = Measured(
                result.layers,
                self._mean(self.whole, result.texts),
                self._mean(self.references, result.texts),
                perplexity(self.model, self.rows, threshold is None),
                result.seconds,
            )
            values = {name: dataclasses.asdict(value) for name, value in self.results.items()}
            self.kept.write(whole=self.whole, results=values)
        value, faster = self.results[name], self.results[WHOLE].seconds / self.results[name].seconds
        print(
            f"{name:<22}layers {value.layers:5.2f}  consistency {value.consistency:.3f}  "
            f"ROUGE-L {value.references:.3f}  perplexity {value.perplexity:7.2f}  {faster:.2f} times as fast",
            flush=True,
        )

    def _mean(self, targets: Sequence[str], texts: Sequence[str]) -> float:
        return math.fsum(map(self.similarity, targets, texts)) / len(texts)


def held_out(config: CalmClaim) -> Tensor:
    """[texts, prompt + new_tokens]: the text's first tokens, a row after another."""
    named: dict[str, Any] = {"path": "valid.txt.gz", "streaming": True}
    data = DataConfig.from_dict(with_data(named, config.data))
    tokenizer, length = load_tokenizer(config.model), config.prompt + config.new_tokens
    needed, text = config.texts * length, ""
    for row in read(data, ("text",), data.path):
        text += str(dict(row)["text"])
        if len(text) >= CHARACTERS * needed:
            break
    ids = tokenizer.encode(text[: CHARACTERS * needed])[:needed]
    if len(ids) < needed:
        raise InputError(f"data: expected {needed} tokens or more, got {len(ids)}; ask for fewer --texts")
    return torch.tensor(ids).view(config.texts, length)


def writing(config: CalmClaim, rows: Tensor) -> tuple[Write, list[str]]:
    """What continues the rows, and how they go on."""
    return continuing(rows.tolist(), config.prompt, load_tokenizer(config.model).decode)


@torch.no_grad()
def perplexity(model: Transformer, rows: Tensor, whole: bool) -> float:
    """Of the rows, each token after those before it in its row, with the exits as they are set."""
    nats, device = 0.0, next(model.parameters()).device
    with whole_depth(whole):
        for part in rows.to(device).split(ROWS):
            loss = model(part, labels=part).loss
            assert loss is not None
            nats += float(loss) * len(part)
    return exp(nats / len(rows))


def curve(results: Results) -> list[tuple[float, float]]:
    """(layers, consistency) of the thresholds and of the whole model, by layers."""
    points = [(v.layers, v.consistency) for name, v in results.items() if not name.startswith("all")]
    return sorted(points)


def fixed(results: Results) -> list[tuple[float, float]]:
    """(layers, consistency) of the exits that all tokens take, by layers."""
    return sorted((v.layers, v.consistency) for name, v in results.items() if name.startswith("all"))


def at(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The line through the points, which rise in x, at x; None outside them."""
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return high if left == right else low + (high - low) * (x - left) / (right - left)
    return None


def verdict(results: Results) -> Verdict:
    """What the figures say of the claim."""
    line = curve(results)
    pairs = [(layers, value, at(line, layers)) for layers, value in fixed(results)]
    compared = [(layers, value, own) for layers, value, own in pairs if own is not None]
    if not compared:
        return verdict_of(False, "not reproduced: no threshold takes as few layers as any fixed exit")
    holds = all(own > value for _, value, own in compared)
    text = "; ".join(f"{layers:g} layers {own:.3f} beside {value:.3f}" for layers, value, own in compared)
    outcome = "reproduced" if holds else "not reproduced"
    return verdict_of(holds, f"{outcome}: consistency by confidence beside that of a fixed depth, {text}")
