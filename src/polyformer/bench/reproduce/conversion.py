"""The claim "a trained model takes another attention" (Beltagy et al. 2020, section 5), CPU-sized.

A dense masked language model is trained, converted to each of `attentions` (`polyformer convert`), measured
as it is, trained on for a few steps, and measured again; the dense model trained on as long stands beside.
The claim holds where what was lost comes back to within `NEAR` of that.
"""

import dataclasses
from pathlib import Path
from typing import Any

from polyformer.bench.claims import encoder_options, taken_up, wikitext, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.checkpoints import convert, read_attention
from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.recipes import Recipe
from polyformer.tasks import TextTask
from polyformer.training.config import at_least

NEAR = 1.05
"""Perplexity over that of the dense model trained on as long: at most so much counts as recovered."""


EXPERIMENT = Experiment(
    sources={"data": "wikitext2"},
    quick={
        "length": 32,
        "steps": 2,
        "more": 1,
        "layers": 1,
        "width": 16,
        "heads": 2,
        "attentions": ("Window(4) | Global(1)", "linformer(k=8, max_length=32)"),
    },
    claims=(
        Claim(
            name="conversion",
            says="a trained model takes another attention",
            paper="Beltagy et al. 2020 (Longformer)",
            section="section 5",
            published="RoBERTa continued with windows reaches a lower MLM bits per character than before, "
            "after 65,000 steps",
            measured="perplexity of a dense masked model converted to four attentions, at once and "
            "trained on",
            scale="WikiText-2, 2 layers of 128, n = 128, 600 steps and 200 more",
            rule="each ends within 1.05 times the perplexity of the dense model trained on as long",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionClaim(Config):
    """Sizes of the runs; a second call goes on with what OUT holds."""

    data: str | None = None  # a directory with WikiText-2's {train,valid}.txt[.gz]; else the default text
    attentions: tuple[str, ...] = (
        "Window(16) | Global(1)",
        "BlockWindow(16) | Global(16) | Random(16, 1)",
        "linformer(k=64, max_length=128)",
        "performer(features=64)",
    )
    length: int = 128
    steps: int = 600  # of the dense model
    more: int = 200  # after the conversion
    layers: int = 2
    width: int = 128
    heads: int = 4
    seed: int = 0
    out: str = "runs/conversion"

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, more=self.more, layers=self.layers, width=self.width, heads=self.heads)
        if not self.attentions:
            raise InputError("attentions: expected a pattern or a mechanism, or several, got none")
        for text in self.attentions:
            read_attention(text)


def run(config: ConversionClaim) -> dict[str, tuple[float, float]]:
    """Perplexity by attention, as converted and after training on; prints a line for each and the verdict."""
    out = Path(config.out)
    dense = taken_up(Recipe.from_dict(recipe(config)), out / "dense")
    assert isinstance(dense.task, TextTask)
    before = dense.scores["validation"]["perplexity"]
    rows = dense.task.held_out(dense.splits.validation or [])
    results: dict[str, tuple[float, float]] = {}
    for number, text in enumerate(("dense", *config.attentions)):
        folder = out / f"start-{number}"
        model, report = convert(dense.model, None if text == "dense" else read_attention(text))
        lost = dense.task.measure(model.eval(), rows)["perplexity"]
        model.save_pretrained(folder)
        dense.task.tokenizer.save(folder)
        on = taken_up(Recipe.from_dict(recipe(config, str(folder.absolute()))), out / f"on-{number}")
        results[text] = lost, on.scores["validation"]["perplexity"]
        new = len(report.newly_initialized)
        print(
            f"{text}: {before:.1f} dense, {lost:.1f} converted ({new} tensors newly initialized), "
            f"{results[text][1]:.1f} after {config.more} steps",
            flush=True,
        )
    rows = ((text, before, *values) for text, values in results.items())
    write_csv(out / "conversion.csv", ("attention", "dense", "converted", "trained_on"), rows)
    conclude(EXPERIMENT, config, [verdict(config, results)])
    return results


def verdict(config: ConversionClaim, results: dict[str, tuple[float, float]]) -> Verdict:
    """What the perplexities say of the claim, a line for each attention."""
    ratios = {text: results[text][1] / results["dense"][1] for text in config.attentions}
    lines = [
        f"{text}: {'recovered' if ratio <= NEAR else 'not recovered'}, "
        f"x{ratio:.3f} of the dense model trained on as long"
        for text, ratio in ratios.items()
    ]
    return verdict_of(max(ratios.values()) <= NEAR, "\n".join(lines))


def recipe(config: ConversionClaim, start: str | None = None) -> dict[str, Any]:
    """The dense model's run, or one that goes on from the checkpoint `start`."""
    model = {"pretrained": start} if start else encoder_options(config, dropout=0.0)
    steps = config.more if start else config.steps
    return {
        "task": {"kind": "mlm", "row_length": config.length, "batch_tokens": 4096, "packed": False},
        "model": model,
        "data": wikitext(config.data),
        "tokenizer": {"path": start} if start else {"algorithm": "bpe", "vocab_size": 2000},
        "optimizer": {"kind": "adamw", "lr": 1e-3 if start else 2e-3},
        "schedule": {"kind": "cosine", "warmup": min(50, steps)},
        "training": {
            "steps": steps,
            "reporting": {"log_every": 50, "evaluate_every": max(1, steps // 2)},
            "saving": {"checkpoint_every": 500},
        },
        "seed": config.seed,
    }
