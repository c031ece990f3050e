"""A trained decoder reads texts longer than it takes: a window, a window with sinks, slower rotations.

A checkpoint reads the beginning of a held-out text in pieces of several lengths: as it is, with each of the
`attentions`, and with each of the `extensions` of its rotary positions, densely and with the last attention;
their factor is the longest length by that of training. Each of `trained_on` is then trained for `steps` rows
of `row_length` tokens and read again.

The claims, and their rules, at the longest length:
1. Xiao et al. 2024 (StreamingLLM), section 3.1, table 1: a window forgets the first tokens, on which trained
   attention rests, and fails; one that keeps four of them does not. It holds where the perplexity of the last
   of `attentions` is below that of the first, and at most `NEAR` times the checkpoint's at its own length.
2. Peng et al. 2024 (YaRN), section 4: it reads beyond the length of training without training. It holds where
   YaRN's perplexity is at most `NEAR` times the checkpoint's at its own length, and below the checkpoint's.

Deviations: one text, the beginning of it; time and memory of one reading each. StreamingLLM numbers positions
within its cache, so that the first tokens are never far away; here they keep their own, and beyond the length
of training their distance is unknown to the model unless its rotations are slowed.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from polyformer.bench.before_after import Measured, Piece, measured, reading
from polyformer.bench.claims import KeptFigures, recipe_from_checkpoint, taken_up, write_csv
from polyformer.bench.experiment import Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.bench.remembering import first_tokens
from polyformer.checkpoints import convert, from_pretrained
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.model import Transformer
from polyformer.recipes import Recipe
from polyformer.training.config import at_least

NEAR = 1.05
"""Perplexity over that of the checkpoint at its own length: at most so much counts as no loss."""

DENSE = "dense"

Figures = dict[str, dict[int, dict[str, float]]]
"""perplexity, tokens_per_second and mib by model and length."""


EXPERIMENT = Experiment(
    sources={"data": "wikitext2", "model": "decoder"},
    quick={
        "lengths": (16, 64),
        "own": 16,
        "tokens": 64,
        "attentions": ("Window(8)", "Window(8) | Global(4)"),
        "trained_on": (),
        "steps": 0,
    },
    claims=(
        Claim(
            name="streaming-sinks",
            says="a window that keeps the first tokens reads on where a window alone fails",
            paper="Xiao et al. 2024 (StreamingLLM)",
            section="section 3.1, table 1",
            published="Llama-2-13B, 65K tokens of PG-19: window 5,158, with four sinks 5.40",
            measured="perplexity of a text in pieces beyond the length of training, by attention",
            scale="SmolLM2-135M, 8,192 positions, 32,768 tokens of WikiText-2",
            rule="at the longest length below the window's, and at most 1.05 times dense at the "
            "checkpoint's own length",
        ),
        Claim(
            name="yarn",
            says="YaRN reads beyond the length of training without training",
            paper="Peng et al. 2024 (YaRN)",
            section="section 4",
            published="extends Llama's context with little fine-tuning; dynamic scaling doubles it without",
            measured="perplexity of a text in pieces beyond the length of training, by extension",
            scale="SmolLM2-135M, 8,192 positions, 32,768 tokens of WikiText-2",
            rule="at the longest length below the checkpoint's, and at most 1.05 times it at its own length",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongTextsClaim(Config):
    """The checkpoint, the text, and sizes; a second call goes on with what OUT holds."""

    model: str  # the folder of a decoder with rotary positions
    data: str | None = None  # WikiText-2's folder, or the file of a book; by default the default text
    lengths: tuple[int, ...] = (2048, 8192, 32_768)
    own: int | None = None  # the length it was trained for; by default as many tokens as it has positions
    tokens: int = 32_768  # read at each length
    attentions: tuple[str, ...] = ("Window(512)", "Window(512) | Global(4)")
    extensions: tuple[str, ...] = ("yarn", "ntk", "interpolation")
    trained_on: tuple[str, ...] = (DENSE, "Window(512) | Global(4)")
    steps: int = 300
    row_length: int = 1024
    lr: float = 2e-5
    precision: Literal["no", "bf16"] = "no"
    seed: int = 0
    out: str = "runs/long-texts"

    def __post_init__(self) -> None:
        at_least(2, row_length=self.row_length)
        at_least(0, steps=self.steps)
        if not self.lengths or min(self.lengths) < 2 or max(self.lengths) > self.tokens:
            raise InputError(
                f"lengths: expected numbers from 2 to tokens, {self.tokens}, got {list(self.lengths)}"
            )
        if not self.attentions:
            raise InputError("attentions: expected a pattern or several, got none")
        for name in self.trained_on:
            if name != DENSE and name not in self.attentions:
                raise InputError(f"trained_on: expected 'dense' or one of attentions, got {quote(name)}")


def run(config: LongTextsClaim) -> Figures:
    """Measure all, train and measure again; write OUT/long-texts.csv and .png, print a table and verdicts."""
    folder = Path(config.out)
    texts = first_tokens(config.data, folder, config.steps * config.row_length, config.tokens + 1)
    model = from_pretrained(config.model).eval()
    results = Results(config, folder / "figures.json", texts["validation"], model)
    own = config.own or model.config.max_position_embeddings
    results.measure(DENSE, lambda: model)
    for name in config.attentions:
        results.measure(name, lambda name=name: converted(model, name))
    for name in config.extensions if max(config.lengths) > own else ():
        sparse = f"{config.attentions[-1]}, {name}"
        results.measure(
            sparse,
            lambda name=name: extended(
                converted(model, config.attentions[-1]), name, own, max(config.lengths)
            ),
        )
        results.measure(name, lambda name=name: extended(model, name, own, max(config.lengths)))
    for number, name in enumerate(config.trained_on if config.steps else ()):
        start = folder / f"start-{number}"
        if not start.is_dir():
            converted(model, name).save_pretrained(start)
        settings = Recipe.from_dict(recipe(config, texts["path"], start))
        results.measure(
            f"{name}, trained on",
            lambda settings=settings, number=number: taken_up(settings, folder / f"on-{number}").model,
        )
    figures = results.values
    rows = [
        (name, length, *(row[key] for key in KEYS))
        for name, lengths in figures.items()
        for length, row in lengths.items()
    ]
    write_csv(folder / "long-texts.csv", ("model", "length", *KEYS), rows)
    print("\n".join(table(config, figures)))
    curves = {
        name: [(length, row["perplexity"]) for length, row in lengths.items()]
        for name, lengths in figures.items()
    }
    line_plot(folder / "long-texts.png", curves, "tokens in a piece", "perplexity", log=True)
    print(f"curves: {folder / 'long-texts.png'}")
    conclude(EXPERIMENT, config, verdicts(config, figures, own))
    return figures


KEYS = "perplexity", "tokens_per_second", "mib"


def converted(model: Transformer, name: str) -> Transformer:
    """The checkpoint with the attention `name`."""
    return model if name == DENSE else convert(model, name)[0]


def extended(model: Transformer, name: str, own: int, longest: int) -> Transformer:
    """The checkpoint with its rotations slowed for texts of the longest length."""
    options = f"factor={longest / own}" + (f", original_max_positions={own}" if name == "yarn" else "")
    return convert(model, extension=f"{name}({options})")[0]


class Results:
    """Figures by model and length, kept in a file as they are measured.

    Raises `InputError` for a file of other settings.
    """

    def __init__(self, config: LongTextsClaim, file: Path, text: str, model: Transformer):
        self.config = config
        tokenizer = load_tokenizer(config.model)
        self.ids = tokenizer.encode(Path(text).read_text(encoding="utf-8"))[: config.tokens + 1]
        self.read = reading(model, tokenizer)
        free = dict.fromkeys(("out", "lengths", "attentions", "extensions", "trained_on"))
        self.kept = KeptFigures(file, {**config.to_dict(), **free})
        self.values: Figures = {
            name: {int(length): row for length, row in lengths.items()}
            for name, lengths in self.kept.stored.get("figures", {}).items()
        }

    def measure(self, name: str, make: Any) -> None:
        """Read the text at every length by the model that `make` gives, unless that was done."""
        rows = self.values.setdefault(name, {})
        missing = [length for length in self.config.lengths if length not in rows]
        model = make() if missing else None
        for length in self.config.lengths:
            if model is not None and length in missing:
                pieces: list[Piece] = [*self.read.pieces(self.ids, length, self.config.tokens // length)]
                result = measured(model, self.read, pieces, length)
                if not isinstance(result, Measured):
                    raise InputError(f"{name}: {result}")
                speed = result.tokens / result.seconds
                rows[length] = {
                    "perplexity": result.perplexity,
                    "tokens_per_second": speed,
                    "mib": result.mib,
                }
                self.kept.write(figures=self.values)
            row = rows[length]
            print(
                f"{name}, {length:,} tokens: perplexity {row['perplexity']:.2f}, "
                f"{row['tokens_per_second']:,.0f} tokens a second, {row['mib']:,.0f} MiB beside the weights",
                flush=True,
            )


def table(config: LongTextsClaim, figures: Figures) -> list[str]:
    """A line a model, a column a length; a gap where an earlier call with the same OUT measured less."""
    wide = max(map(len, figures))
    head = "".join(f"{length:>10,}" for length in config.lengths)
    lines = [f"{'perplexity, tokens':<{wide}}{head}"]
    for name, rows in figures.items():
        cells = (rows.get(length) for length in config.lengths)
        lines.append(
            f"{name:<{wide}}" + "".join(f"{cell['perplexity']:10.2f}" if cell else " " * 10 for cell in cells)
        )
    return lines


def verdicts(config: LongTextsClaim, figures: Figures, own: int) -> list[Verdict | None]:
    """What the figures say of both claims; None where YaRN was left out."""
    longest = max(config.lengths)
    known = max((length for length in config.lengths if length <= own), default=min(config.lengths))
    reference = figures[DENSE][known]["perplexity"]

    def at_longest(name: str) -> float:
        return figures[name][longest]["perplexity"]

    window, sinks = at_longest(config.attentions[0]), at_longest(config.attentions[-1])
    holds = sinks < window and sinks <= NEAR * reference
    sinking = verdict_of(
        holds,
        f"a window that keeps the first tokens reads on: {_said(holds)} ({sinks:.2f} at {longest:,} tokens, "
        f"without them {window:.2f}, dense at {known:,} {reference:.2f})",
    )
    if longest not in figures.get("yarn", {}):
        return [sinking, None]
    yarn, dense = at_longest("yarn"), at_longest(DENSE)
    holds = yarn < dense and yarn <= NEAR * reference
    extending = verdict_of(
        holds,
        f"YaRN reads beyond the length of training: {_said(holds)} ({yarn:.2f} at {longest:,} tokens, "
        f"without it {dense:.2f}, dense at {known:,} {reference:.2f})",
    )
    return [sinking, extending]


def _said(holds: bool) -> str:
    return "reproduced" if holds else "differs from the paper"


def recipe(config: LongTextsClaim, text: str, start: Path) -> dict[str, Any]:
    """A run over the text from the checkpoint `start`."""
    names = "row_length", "steps", "lr", "precision", "seed"
    sizes = {name: getattr(config, name) for name in names}
    return recipe_from_checkpoint(start, config.model, text, **sizes)
