"""The claim that a translator with early exits keeps the full model's BLEU with a fraction of its decoder's
layers (Elbayad et al. 2020, Depth-Adaptive Transformer, section 5, figure 4), CPU-sized.

One encoder-decoder is trained with an exit after every layer of its decoder, aligned, and a unit at each that
learns when to leave from an oracle. Validation sentences choose the threshold (grid search): that of the
fewest layers whose BLEU lies at most `margin` below that of the whole model. From there each exit gets a
threshold of its own: exit by exit all of the grid is tried, the others as they are, and what takes the fewest
layers within the margin stays (`sweeps` times through all exits). Test sentences are then translated by the
whole model, with the one threshold and with those, and with all tokens leaving after one and the same layer:
what a smaller depth, fixed beforehand, gives.

The claim holds where the test BLEU with the one threshold lies at most `points` below the whole model's, with
three quarters of the decoder's layers or fewer.

Deviations: Multi30k, or other pairs, in place of IWSLT'14 and WMT'14, a model a hundred times smaller, greedy
search.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polyformer.bench.claims import fields_of, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.calibration.texts import translating, written
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.files import atomic_write
from polyformer.data import DataConfig, read
from polyformer.generation import BeamConfig
from polyformer.model import Transformer
from polyformer.recipes import Recipe
from polyformer.recipes.find import absolute, with_data
from polyformer.tasks import Translation
from polyformer.training.config import at_least

SHARE = 0.75
"""Of the decoder's layers, at most."""

SIDES = "source", "target"


EXPERIMENT = Experiment(
    sources={"data": "multi30k"},
    quick={
        "layers": 3,
        "width": 16,
        "heads": 2,
        "vocabulary": 300,
        "batch_tokens": 600,
        "steps": 2,
        "thresholds": (0.5,),
        "sweeps": 0,
        "sentences": 4,
        "rows": 64,
    },
    claims=(
        Claim(
            name="depth-adaptive",
            says="a translator with early exits keeps the full model's BLEU with a fraction of its "
            "decoder's layers",
            paper="Elbayad et al. 2020 (Depth-Adaptive Transformer)",
            section="section 5, figure 4",
            published="IWSLT'14 and WMT'14: the same BLEU with less than a quarter of the decoder's layers",
            measured="test BLEU and layers a token at a threshold that validation chooses",
            scale="Multi30k, 6 decoder layers of 128, 900 steps",
            rule="at most 0.5 BLEU below the whole model, with three quarters of its decoder's "
            "layers or fewer",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthAdaptiveClaim(Config):
    """Sizes of the run; a second call goes on with what OUT holds."""

    data: str | None = None  # a directory with the files below, by default Multi30k's
    train: str = "train.{en,de}.gz"
    validation: str = "val.{en,de}.gz"
    test: str = "test_2016_flickr.{en,de}.gz"
    rows: int | None = None  # pairs read of each split, by default all
    layers: int = 6  # of the decoder; the encoder has half as many
    width: int = 128
    heads: int = 4
    vocabulary: int = 4000
    batch_tokens: int = 3000
    steps: int = 1500
    lr: float = 2e-3
    rule: str = "classifier(target=exit)"
    thresholds: tuple[float, ...] = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    sweeps: int = 1  # through the exits, each with a threshold of its own; 0: one for all
    sentences: int = 1000  # of validation and test, at most: a BLEU of 200 is off by one
    margin: float = 0.3
    points: float = 0.5
    seed: int = 0
    out: str = "runs/depth-adaptive"

    def __post_init__(self) -> None:
        at_least(2, layers=self.layers)
        at_least(0, sweeps=self.sweeps)
        at_least(1, steps=self.steps, sentences=self.sentences, width=self.width, heads=self.heads)
        if self.data is None:
            raise InputError(
                "data: the built-in text has no translations; name Multi30k's directory with --data DIR, or "
                "another with --train, --validation and --test, as 'train.{en,vi}'"
            )


@dataclasses.dataclass(frozen=True)
class Measured:
    """A way to translate: its BLEU, layers a token, and seconds."""

    bleu: float
    layers: float
    seconds: float


Results = dict[str, Measured]
Threshold = float | tuple[float, ...]
"""One for all exits, or one for each."""


def run(config: DepthAdaptiveClaim) -> Results:
    """Train, choose and measure; write OUT/depth-adaptive.csv and .png, print a table and the verdict."""
    folder = Path(config.out)
    fitted = taken_up(Recipe.from_dict(recipe(config)), folder / "run")
    task, model = fitted.task, fitted.model
    assert isinstance(task, Translation)
    validation, test = (pairs(config, split, config.sentences) for split in ("validation", "test"))

    def tried(threshold: Threshold) -> Measured:
        value = measured(task, model, validation, threshold)
        show(f"validation, {name_of(threshold)}", value)
        return value

    least = measured(task, model, validation, None).bleu - config.margin
    searched = {threshold: tried(threshold) for threshold in config.thresholds}
    chosen = choose(searched, least)
    results = {"whole": measured(task, model, test, None)}
    if chosen is not None:
        results[name_of(chosen)] = measured(task, model, test, chosen)
        own = each(config, (chosen,) * (config.layers - 1), searched[chosen], tried, least)
        if len({*own}) > 1:
            results[name_of(own)] = measured(task, model, test, own)
    for layer in range(1, config.layers):
        at = [float(layer != exit) for exit in range(1, config.layers)]
        results[f"all after layer {layer}"] = measured(task, model, test, at)
    for name, value in results.items():
        show(name, value)
    rows = ((name, *dataclasses.astuple(value)) for name, value in results.items())
    write_csv(folder / "depth-adaptive.csv", ("way", *fields_of(Measured)), rows)
    curves = {
        "by threshold, validation": sorted((value.layers, value.bleu) for value in searched.values()),
        "one depth for all, test": [
            (value.layers, value.bleu) for name, value in results.items() if not name.startswith("threshold")
        ],
    }
    curves["one depth for all, test"].sort()
    line_plot(folder / "depth-adaptive.png", curves, "layers a token", "BLEU")
    conclude(EXPERIMENT, config, [verdict(config, results)])
    return results


def recipe(config: DepthAdaptiveClaim) -> dict[str, Any]:
    """The run, as a recipe has it."""
    sizes = {"hidden_size": config.width, "intermediate_size": 4 * config.width}
    return {
        "task": {"kind": "translate", "batch_tokens": config.batch_tokens, "beam": {"num_beams": 1}},
        "model": {
            "preset": "transformer-small",
            "dropout": 0.1,
            "num_attention_heads": config.heads,
            "encoder.num_hidden_layers": config.layers // 2,
            "decoder.num_hidden_layers": config.layers,
            "decoder.depth": f"exits(rule={config.rule})",
            **sizes,
        },
        "data": files(config),
        "tokenizer": {"algorithm": "bpe", "vocab_size": config.vocabulary},
        "optimizer": {"kind": "adam", "lr": config.lr},
        "schedule": {"kind": "cosine", "warmup": min(200, config.steps // 4 + 1), "floor": 0.02},
        "training": {
            "steps": config.steps,
            "reporting": {"log_every": 50, "evaluate_every": config.steps},
            "saving": {"checkpoint_every": 100},
        },
        "seed": config.seed,
    }


def files(config: DepthAdaptiveClaim) -> dict[str, str]:
    """Those of the data by their role in a recipe; with `rows`, their first pairs, written into OUT."""
    names = {"path": config.train, "validation": config.validation, "test": config.test}
    if config.rows is None:
        return absolute(with_data(names, folder_of(config)))
    split, folder = {"path": "train", "validation": "validation", "test": "test"}, Path(config.out) / "pairs"
    for role in names:
        for side, texts in zip(SIDES, pairs(config, split[role], config.rows)):
            atomic_write(folder / f"{role}.{side}", "".join(f"{text}\n" for text in texts).encode())
    return {role: str(folder.absolute() / f"{role}.{{{','.join(SIDES)}}}") for role in names}


def pairs(config: DepthAdaptiveClaim, split: str, count: int) -> tuple[list[str], list[str]]:
    """Sources and references of a split, the first `count` of them."""
    named = {"path": getattr(config, split)}
    data = DataConfig.from_dict(absolute(with_data(named, folder_of(config))))
    rows = [dict(row) for row in itertools.islice(read(data, SIDES, data.path), count)]
    sources, references = ([str(row[side]) for row in rows] for side in SIDES)
    return sources, references


def folder_of(config: DepthAdaptiveClaim) -> str:
    """Of the data, which the configuration has checked to be named."""
    assert config.data is not None
    return config.data


def measured(
    task: Translation,
    model: Transformer,
    sentences: tuple[list[str], list[str]],
    threshold: float | Sequence[float] | None,
) -> Measured:
    """Translations with exits at `threshold`, or one for each exit; None for the whole model."""
    import sacrebleu

    sources, references = sentences
    result = written(model, translating(Greedy(task), sources), threshold)
    return Measured(sacrebleu.corpus_bleu(result.texts, [references]).score, result.layers, result.seconds)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """A task that translates without beams."""

    task: Translation

    def translate(self, model: Transformer, texts: Sequence[str]) -> list[str]:
        """The translation of each text."""
        return self.task.translate(model, texts, BeamConfig(num_beams=1))


def choose(searched: dict[float, Measured], least: float) -> float | None:
    """The threshold of the fewest layers whose BLEU is `least` or more; None where there is none."""
    good = [(value.layers, threshold) for threshold, value in searched.items() if value.bleu >= least]
    return min(good)[1] if good else None


def each(
    config: DepthAdaptiveClaim,
    start: tuple[float, ...],
    value: Measured,
    tried: Callable[[Threshold], Measured],
    least: float,
) -> tuple[float, ...]:
    """A threshold for each exit: from `start`, which measured `value`, exit by exit that of the fewest layers
    whose BLEU is `least` or more, the others as they are."""
    best = start
    for number in list(range(len(start))) * config.sweeps:
        for threshold in config.thresholds:
            others = (*best[:number], threshold, *best[number + 1 :])
            if others == best:
                continue
            other = tried(others)
            if other.bleu >= least and other.layers < value.layers:
                best, value = others, other
    return best


def name_of(threshold: Threshold) -> str:
    """How tables call it."""
    values = threshold if isinstance(threshold, tuple) else (threshold,)
    return f"threshold{'s' * (len(values) > 1)} {' '.join(map(str, values))}"


def show(name: str, value: Measured) -> None:
    """One line."""
    print(f"{name:<44}BLEU {value.bleu:6.2f}  layers {value.layers:5.2f}  {value.seconds:7.1f} s", flush=True)


def verdict(config: DepthAdaptiveClaim, results: Results) -> Verdict:
    """What the figures say of the claim, and beside it of thresholds for each exit."""
    whole = results["whole"]
    chosen = [value for name, value in results.items() if name.startswith("threshold ")]
    if not chosen:
        text = f"not reproduced: no threshold is within {config.margin} BLEU of the whole model in validation"
        return verdict_of(False, text)
    lost, share = whole.bleu - chosen[0].bleu, chosen[0].layers / config.layers
    own = [value for name, value in results.items() if name.startswith("thresholds ")]
    text = f"{chosen[0].bleu:.2f} BLEU beside {whole.bleu:.2f}, with {share:.0%} of the decoder's layers"
    if own:
        text += f"; a threshold for each exit: {own[0].bleu:.2f}, {own[0].layers / config.layers:.0%}"
    holds = lost <= config.points and share <= SHARE
    return verdict_of(holds, f"{'reproduced' if holds else 'not reproduced'}: {text}")
