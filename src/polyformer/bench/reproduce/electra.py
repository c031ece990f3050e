"""The claim "ELECTRA learns more than masked modelling at equal compute" (Clark et al. 2020), CPU-sized.

Two encoders of one size are pre-trained on WikiText-2: one guesses hidden tokens, the other finds the tokens
that a small generator replaced; the first makes as many more steps as the generator's cost pays for. What
they learnt is probed on SST-2 (`polyformer.bench.probing`). For scale: the same encoder untrained, and a bag
of words. The claim holds where ELECTRA's probe lies above.

Compute is counted: multiplications of matrices and of attention, threefold for a step, as Clark et al. count
(appendix G), not of elementwise work. What a step of each takes is measured beside it, in turn.

Deviations: a few hundred steps on 2M words for a million on 3300M, and a linear probe for fine-tuning.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyformer.architecture import ModelConfig
from polyformer.bench.claims import fields_of, sized, taken_up, wikitext, write_csv
from polyformer.bench.experiment import DIFFERS, REPRODUCED, UNSHOWN, Claim, Experiment, Verdict, conclude
from polyformer.bench.labelled_texts import bag_of_words, prepare
from polyformer.bench.probing import Probe, probe
from polyformer.bench.timing import in_turn, median
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.data.batching import Batch
from polyformer.heads import DetectConfig, MaskedConfig
from polyformer.model import Transformer
from polyformer.presets import model_config
from polyformer.recipes import Recipe
from polyformer.recipes.fit import Fitted
from polyformer.tasks import Fitting, TextTask
from polyformer.tasks.electra import generator_config
from polyformer.training.config import at_least

KINDS = ("mlm", "electra")


EXPERIMENT = Experiment(
    sources={"data": "wikitext2", "sst2": "sst2"},
    quick={
        "steps": 2,
        "length": 16,
        "batch_tokens": 64,
        "layers": 1,
        "width": 16,
        "heads": 2,
        "vocabulary": 100,
        "texts": 40,
        "tests": 20,
    },
    claims=(
        Claim(
            name="electra",
            says="replaced-token detection learns more than masked modelling at equal compute",
            paper="Clark et al. 2020 (ELECTRA)",
            section="section 3.2, table 1",
            published="GLUE at BERT-small's compute: 79.9 beside 75.1",
            measured="linear probes of SST-2 after pre-training at equal counted operations",
            scale="WikiText-2, 2 layers of 128, 800 steps",
            rule="ELECTRA's probe is more than two standard errors above; not shown where neither is "
            "above an untrained encoder",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElectraClaim(Config):
    """Sizes of the two runs; a second call goes on with what OUT holds."""

    data: str | None = None  # a directory with WikiText-2's {train,valid}.txt[.gz]; the default text without
    sst2: str | None = None  # a directory with {train,test}.tsv[.gz]: text, label
    steps: int = 800  # of ELECTRA
    length: int = 64
    batch_tokens: int = 2048
    layers: int = 2
    width: int = 128
    heads: int = 4
    generator_size: float = 0.25
    vocabulary: int = 4000
    lr: float = 2e-3
    texts: int = 10000  # sentences to probe with, at most
    tests: int = 5000
    seed: int = 0
    out: str = "runs/electra"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, layers=self.layers, width=self.width, heads=self.heads)
        at_least(16, length=self.length)
        if self.sst2 is None:
            raise InputError("sst2: name the directory of the sentences to probe with, by --sst2 DIR")


def run(config: ElectraClaim) -> dict[str, Probe]:
    """Train both, probe, write OUT/electra.csv, print the table and the verdict."""
    assert config.sst2 is not None
    folder, results = Path(config.out), {}
    texts = prepare(
        "sst2", config.sst2, config.length - 2, config.texts, config.tests, config.vocabulary, folder / "data"
    )
    fitted: dict[str, Fitted] = {}
    for kind in KINDS:
        fitted[kind] = taken_up(Recipe.from_dict(recipe(config, kind)), folder / kind)
        print(
            f"{kind}: {fitted[kind].result.step} steps, {figures_of(fitted[kind].scores['validation'])}",
            flush=True,
        )
    torch.manual_seed(config.seed)
    encoders = {"untrained": Transformer(fitted["mlm"].model.config).eval()}
    encoders |= {kind: run.model for kind, run in fitted.items()}
    for name, encoder in encoders.items():
        task = fitted["mlm"].task
        assert isinstance(task, TextTask)
        results[name] = probe(task, encoder, texts)
    counted, measured = costs(config)["electra"] / costs(config)["mlm"], step_ratio(fitted)
    rows = ((name, *dataclasses.astuple(probed)) for name, probed in results.items())
    write_csv(folder / "electra.csv", ("encoder", *fields_of(Probe)), rows)
    print(table(results, bag_of_words(texts), len(texts.test)))
    print(
        f"an ELECTRA step is counted {counted:.2f} and measured {measured:.2f} times one of masked modelling"
    )
    conclude(EXPERIMENT, config, [verdict(results, len(texts.test))])
    return results


def recipe(config: ElectraClaim, kind: str) -> dict[str, Any]:
    """One of the runs."""
    cost = costs(config)
    steps = round(config.steps * cost["electra"] / cost[kind])
    own = {"generator_size": config.generator_size} if kind == "electra" else {}
    return {
        "task": {
            "kind": kind,
            "row_length": config.length,
            "batch_tokens": max(config.length, config.batch_tokens),
            **own,
        },
        "model": encoder_options(config),
        "data": wikitext(config.data),
        "tokenizer": {"algorithm": "wordpiece", "vocab_size": config.vocabulary, "lowercase": True},
        "optimizer": {"kind": "adamw", "lr": config.lr},
        "schedule": {"kind": "linear", "warmup": max(1, steps // 10)},
        "training": {
            "steps": steps,
            "reporting": {"log_every": min(20, steps), "evaluate_every": steps},
            "saving": {"checkpoint_every": max(1, steps // 3)},
        },
        "seed": config.seed,
    }


def encoder_options(config: ElectraClaim) -> dict[str, Any]:
    """The options of both encoders."""
    return sized("encoder-small", config, dropout=0.0)


def costs(config: ElectraClaim, share: float = 0.15) -> dict[str, float]:
    """Floating-point operations of training with one token, `share` of the tokens hidden."""
    options = {name: value for name, value in encoder_options(config).items() if name != "preset"}
    model = model_config("encoder-small", {**options, "vocab_size": config.vocabulary})
    masked, detecting = (dataclasses.replace(model, head=head) for head in (MaskedConfig(), DetectConfig()))
    generator = generator_config(model, config.generator_size)
    drawing = 2 * share * _decoder(generator)  # once more than in training, without a gradient
    return {
        "mlm": 3 * (_body(masked, config.length) + 2 * share * _decoder(masked)),
        "electra": 3 * (_body(detecting, config.length) + 2 * (config.width + 1) * config.width)
        + 3 * (_body(generator, config.length) + 2 * share * _decoder(generator))
        + drawing,
    }


def _body(config: ModelConfig, length: int) -> float:
    """Of one pass through the layers and what widens the embedding, a token."""
    with torch.device("meta"):
        model = Transformer(config)
    assert config.encoder is not None
    linear = [
        module
        for part in (model.encoder, model.encoder_embedding)
        if part is not None
        for module in part.modules()
        if isinstance(module, nn.Linear)
    ]
    matrices = sum(module.weight.numel() for module in linear)
    attention = 2 * length * config.hidden_size * config.encoder.num_hidden_layers
    return 2 * (matrices + attention)


def _decoder(config: ModelConfig) -> int:
    """Weights between a hidden state and its logits over the vocabulary."""
    width = config.embedding.width(config.hidden_size)
    return config.hidden_size * width + width * config.vocab_size


def step_ratio(fitted: dict[str, Fitted], repeats: int = 5) -> float:
    """A step of ELECTRA over one of masked modelling, forward and backward, measured in turn."""
    steps = {kind: _step(run) for kind, run in fitted.items()}
    seconds = {kind: median(times) for kind, times in in_turn(steps, repeats).items()}
    return seconds["electra"] / seconds["mlm"]


def _step(fitted: Fitted) -> Callable[[], None]:
    task = fitted.task
    batch: Batch = next(iter(Fitting(task, fitted.splits, 0).batches(0, 0, 0, 1)))
    module = task.training_module(fitted.model, fitted.run.folder)

    def call() -> None:
        module.zero_grad(set_to_none=True)
        task.loss(module.train(), batch).backward()
        module.eval()

    return call


def verdict(results: dict[str, Probe], tests: int) -> Verdict:
    """What the accuracies say of the claim; a difference of two standard errors counts."""
    gain = results["electra"].accuracy - results["mlm"].accuracy
    error = (2 * results["mlm"].accuracy * (1 - results["mlm"].accuracy) / tests) ** 0.5
    outcome = words = REPRODUCED if gain > 2 * error else DIFFERS
    if max(results["electra"].accuracy, results["mlm"].accuracy) <= results["untrained"].accuracy + error:
        outcome, words = UNSHOWN, "not shown, for neither learnt more than an untrained encoder has"
    return Verdict(
        outcome,
        f"ELECTRA over masked modelling at equal compute: {words} ({100 * gain:+.1f} points, standard error "
        f"{100 * error:.1f})",
    )


def figures_of(scores: dict[str, float]) -> str:
    """Scores in a line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in scores.items())


def table(results: dict[str, Probe], words: float, tests: int) -> str:
    """The outcomes as aligned text."""
    error = 100 * (0.25 / tests) ** 0.5
    lines = [f"{'SST-2, linear probe':<22}{'test':>8}{'layer':>7}{'last layer':>12}"]
    lines += [
        f"{name:<22}{probed.accuracy:>8.1%}{probed.layer:>7}{probed.last:>12.1%}"
        for name, probed in results.items()
    ]
    lines += [f"{'bag of words':<22}{words:>8.1%}", f"(the standard error is at most {error:.1f} points)"]
    return "\n".join(lines)
