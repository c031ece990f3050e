"""Commands that choose a setting of a trained model by a text, without training: fit-pattern, calibrate."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from polyformer.cli.commands.inputs import CHARACTERS, ModelAndTexts, load, token_rows
from polyformer.cli.commands.options import Device, argument, device, option, parse_numbers
from polyformer.core.errors import InputError
from polyformer.core.paths import check_format
from polyformer.core.ranges import NEW_TOKENS, PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.exits import ThresholdTest, Write
    from polyformer.applications.pattern_fitting import FittedPattern
    from polyformer.cli.plots.model import FitQuality
    from polyformer.models.architectures import Transformer

FIT_PATTERN_EXAMPLES = """examples:
  polyformer fit-pattern smollm2.gguf --text valid.txt --budget 0.25 --out pattern.txt
  polyformer convert smollm2.gguf sparse --attention "$(cat pattern.txt)"
  polyformer fit-pattern minilm-dir --text notes.txt --length 512 --texts 8 --figure heads.png
  polyformer fit-pattern smollm2.gguf --text valid.txt --evaluate test.txt --probe niah_single_2,vt
"""

LONGEST = 8192
"""Largest default length."""


@dataclass(frozen=True, kw_only=True)
class FitPatternOptions:
    """Options of `polyformer fit-pattern`."""

    model: str = argument(
        "folder of a trained run, or of a checkpoint with its tokenizer; or a GGUF file", metavar="MODEL"
    )
    text: str | None = option(
        "text to fit to (default: the training data of the run, or the default text)", metavar="TEXT"
    )
    budget: str = option(
        "share of the query-key pairs of dense attention that the model may compute, above 0 and up to 1; "
        "several shares, separated by commas, are all fitted (default: 0.25)",
        "0.25",
        metavar="SHARE,...",
    )
    length: PositiveInt | None = option(
        "tokens per text (default: the number of positions of the model, at most 8192)"
    )
    texts: PositiveInt = option("texts to average over (default: 1)", 1)
    patterns: Annotated[int, Interval(ge=1, le=4)] = option(
        "largest number of different patterns in a layer, 1 to 4: each is a separate call, so fewer are "
        "faster, and more lose less (default: 2)",
        2,
    )
    out: str | None = option(
        "write the pattern to this file; of several budgets the last (default: only print it)",
        metavar="FILE",
        output="file",
    )
    figure: str | None = option(
        "draw the share of the pairs that each head got to this file, .png or .svg, and with --evaluate the "
        "quality by budget",
        metavar="FILE",
        output="file",
    )
    evaluate: str | None = option("compare dense and sparse attention on this text", metavar="TEXT")
    tokens: PositiveInt = option("with --evaluate: tokens to read (default: 16384)", 16_384)
    probe: str | None = option(
        "with --evaluate, for a decoder: tasks of `polyformer probe` in that text, separated by commas, for "
        "example niah_single_2, which hides numbers",
        metavar="NAME,...",
    )
    samples: PositiveInt = option("with --probe: prompts per task (default: 20)", 20)
    device: Device = device()


def run_fit_pattern(options: FitPatternOptions) -> None:
    """Find a sparse attention pattern for each head of a trained model, under a budget of query-key pairs.

    Runs the dense model on a text, forward and backward, and measures for each head how much each of a list
    of patterns would change the loss: windows with and without first tokens, strides, blocks with random
    blocks, all keys. Then chooses the patterns with the least total error that compute at most --budget of
    the pairs of dense attention. No weight changes. The result is an expression for `polyformer convert
    --attention`, `attach` and `from_pretrained`. It fits texts of --length tokens: shorter texts are computed
    more densely.

    With --evaluate, compares the dense model with the pattern at every budget: perplexity (of masked tokens
    for an encoder; for an embedding model the similarity of its vectors), speed, and with --probe the scores
    of a decoder in tasks of `polyformer probe`. Use a text that is not in --text.
    """
    from polyformer.applications.pattern_fitting import candidates, check_budget, fit_pattern, head_errors
    from polyformer.core.files import write_output
    from polyformer.core.ops.cpu import model_threads

    budgets = parse_numbers("--budget", options.budget)
    # The measurement takes minutes, so a wrong option is an error before it.
    for budget in budgets:
        check_budget(budget)
    if options.figure is not None:
        check_format(options.figure, (".png", ".svg"), "--figure")
    source = load(options.model, options.text, options.device)
    length = options.length or min(source.model.config.max_position_embeddings, LONGEST)
    qualities = evaluation(options, source, length)
    rows, start = token_rows(source, source.columns[0], length, options.texts), time.perf_counter()
    with model_threads(source.model):
        errors = head_errors(source.model, rows, candidates(length))
        fits = [fit_pattern(errors, budget, options.patterns) for budget in budgets]
    print(f"{len(rows)} x {length:,} tokens measured in {time.perf_counter() - start:.0f} s")
    for budget, fitted in zip(budgets, fits):
        show(budget, fitted)
    pattern = fits[-1].pattern.to_text()
    print(f"\n{pattern}" if options.out is None else f"\nwritten to {options.out}")
    if options.out is not None:
        write_output(options.out, f"{pattern}\n".encode())
    results = [] if qualities is None else list(qualities(fits))
    if options.figure is not None:
        from polyformer.cli.plots.model import draw_fit

        draw_fit(fits, results, Path(options.model).name, Path(options.figure), write_output)
        print(f"drawn in {options.figure}")


def show(budget: float, fitted: "FittedPattern") -> None:
    """Print how many heads got each pattern, and what these heads lost."""
    from rich.console import Console
    from rich.table import Table

    from polyformer.cli.plots.model import short_text

    errors, chosen = fitted.errors, fitted.chosen
    title = f"budget {budget:g}: {fitted.share:.2%} of the pairs"
    table = Table(title=title, title_justify="left")
    for heading in ("pattern", "heads", "pairs of a head", "attention mass lost"):
        table.add_column(heading, justify="left" if heading == "pattern" else "right")
    for index in errors.costs.argsort(stable=True).tolist():
        heads = chosen == index
        if heads.any():
            share = float(errors.costs[index] / errors.costs.max())
            lost = float(errors.lost[..., index][heads].mean())
            table.add_row(
                short_text(errors.patterns[index]), str(int(heads.sum())), f"{share:.2%}", f"{lost:.2%}"
            )
    console = Console(highlight=False)
    console.print()
    console.print(table)


def evaluation(
    options: FitPatternOptions, source: ModelAndTexts, length: int
) -> "Callable[[list[FittedPattern]], Iterator[FitQuality]] | None":
    """Return a function that yields the quality of each fit, and prints it compared with dense attention.

    None without --evaluate. Raises `InputError` for wrong options of the evaluation.
    """
    from polyformer.applications.probing import ProbeConfig, probe, prompts, read_text
    from polyformer.cli.commands.before_after import (
        Comparison,
        comparison_table,
        measure,
        probed,
        text_reader,
    )
    from polyformer.cli.plots.model import FitQuality
    from polyformer.data.sources.files import opened
    from polyformer.models.checkpoints import convert

    names = [] if options.probe is None else [name.strip() for name in options.probe.split(",")]
    if options.evaluate is None:
        if names:
            raise InputError("--probe: requires --evaluate TEXT")
        return None
    with opened(Path(options.evaluate)) as file:
        ids = source.tokenizer.encode(file.read(CHARACTERS * max(options.tokens, length)))
    read = text_reader(source.model, source.tokenizer)
    pieces = [*read.pieces(ids, length, max(1, options.tokens // length))]
    if not pieces:
        raise InputError(f"--evaluate: expected more than {length} tokens, got {len(ids)}; use a longer text")
    config, text = ProbeConfig(samples=options.samples), read_text(options.evaluate, "text")
    for name in names:
        prompts(name, length, probed(source.model, source.tokenizer), text, config)

    def scores(model: "Transformer") -> dict[str, float]:
        results = probe(probed(model, source.tokenizer), names, [length], text, config) if names else []
        return {result.task: result.score for result in results}

    def qualities(fits: "list[FittedPattern]") -> "Iterator[FitQuality]":
        dense, before = measure(source.model, read, pieces, length), scores(source.model)
        for fitted in fits:
            sparse, _ = convert(source.model, fitted.pattern)
            row = Comparison(length, dense, measure(sparse, read, pieces, length), read.embeds)
            after = scores(sparse)
            heading, *lines = comparison_table([row])
            lines += [f"  {name}: {before[name]:.1%} -> {after[name]:.1%}" for name in names]
            print("\n".join([f"\n{fitted.share:.2%} of the pairs, dense -> sparse:", heading, *lines]))
            yield FitQuality(row, before, after)

    return qualities


CALIBRATE_EXAMPLES = """examples:
  polyformer calibrate runs/mine --data valid.txt
  polyformer calibrate smollm2-exits --data valid.txt --risk 0.1 --confidence 0.9 --texts 100
  polyformer calibrate runs/multi30k --data valid.tsv --measure references
  polyformer calibrate runs/mine --data valid.md --format text --thresholds 0.99,0.95,0.9
"""


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of `polyformer calibrate`."""

    model: str = argument("folder of a trained run, or of a checkpoint, with early exits", metavar="MODEL")
    data: str | None = option(
        "texts to calibrate with; pairs for a translation model (default: the run's validation data)",
        metavar="PATH",
    )
    format: str | None = option(
        "format of PATH, if its name does not show it: text, lines, articles, tsv, ..."
    )
    risk: float = option("largest expected loss of quality, from 0 to 1 (default: 0.05)", 0.05)
    confidence: float = option("probability that the loss is within the risk (default: 0.95)", 0.95)
    measure: Literal["consistency", "references"] = option(
        "quality: agreement with the texts generated without exits, or ROUGE-L against the references "
        "(default: consistency)",
        "consistency",
    )
    thresholds: str | None = option(
        "thresholds to test, in decreasing order, separated by commas (default: 0.95,0.9,...,0.05)",
        metavar="X,X",
    )
    texts: PositiveInt = option("largest number of texts (default: 200)", 200)
    prompt: PositiveInt = option(
        "for a decoder-only model: tokens of each text that it reads as the prompt (default: 32)", 32
    )
    new_tokens: PositiveInt = option(
        "for a decoder-only model: tokens to generate (default: 32)", 32, most=NEW_TOKENS
    )
    device: Device = device()


def run_calibrate(options: CalibrateOptions) -> None:
    """Choose the threshold of a model's early exits for a given risk, and save it in the checkpoint.

    Generates texts without exits and with exits at decreasing thresholds, and saves the lowest threshold that
    passes Learn then Test (Schuster et al. 2022, CALM): with probability --confidence, the generated texts
    lose at most --risk of their quality on average. `generate` and `translate` then use this threshold. The
    texts must not be part of the training data.
    """
    from polyformer.applications.exits import CalibrateConfig, calibrate, check_texts, exits_of
    from polyformer.cli.commands.inputs import load
    from polyformer.core.files import atomic_write
    from polyformer.core.ops.cpu import model_threads
    from polyformer.data import DataConfig
    from polyformer.models.architectures.pretrained import CONFIG

    asked = CalibrateConfig(risk=options.risk, confidence=options.confidence, measure=options.measure)
    if options.thresholds is not None:
        asked = replace(asked, thresholds=parse_numbers("--thresholds", options.thresholds))
    check_texts(options.texts, asked)
    if not Path(options.model).exists():
        raise InputError(f"{options.model}: no such directory; expected a run or a checkpoint with exits")
    source = load(options.model, held_out(options), options.device)
    exits_of(source.model)
    if options.format is not None:
        data = DataConfig.from_dict({**source.data.to_dict(), "format": options.format}, "data")
        source = replace(source, data=data)
    write, references = writing(options, source)
    check_texts(len(references), asked)
    layers = source.model.config.decoder.num_hidden_layers  # type: ignore[union-attr]
    print(f"{len(references)} texts; without exits a token passes {layers} layers\n")
    print("threshold    risk   p-value   layers per token   speedup")
    with model_threads(source.model):
        result = calibrate(source.model, write, references, asked, _show)
    if result.threshold is None:
        print(f"\nno threshold passes the test at risk {asked.risk}; {options.model} is unchanged")
        return
    atomic_write(Path(options.model) / CONFIG, source.model.config.to_json().encode())
    print(f"\nthreshold {result.threshold}: saved in {Path(options.model) / CONFIG}")


def _show(test: "ThresholdTest") -> None:
    measured = f"{test.threshold:9.2f}  {test.risk:6.4f}  {test.p_value:8.4f}"
    print(f"{measured}  {test.layers:17.2f}  {test.speed:8.2f}", flush=True)


def held_out(options: CalibrateOptions) -> str:
    """Return --data, or the validation data of the run."""
    from polyformer.models.architectures.pretrained import RECIPE
    from polyformer.training.recipes.run import Run

    if options.data is not None:
        return options.data
    named = None
    if (Path(options.model) / RECIPE).is_file():
        named = Run.open(options.model).recipe.data.validation
    if named is None:
        raise InputError("--data is missing: name texts that the model was not trained on")
    return named


def writing(options: CalibrateOptions, source: "ModelAndTexts") -> "tuple[Write, list[str]]":
    """Return the function that generates the texts, and the references."""
    from itertools import islice

    from polyformer.applications.exits import continuation_generator, translation_generator
    from polyformer.cli.commands.inputs import texts, token_rows
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks import Translation

    if source.model.encoder is None:
        length = options.prompt + options.new_tokens
        rows = token_rows(source, source.columns[0], length, options.texts)
        return continuation_generator(rows, options.prompt, source.tokenizer.decode)
    if len(source.columns) < 2:
        raise InputError(
            f"{options.model}: a translation model can be calibrated only as a run, which has text pairs"
        )
    pairs = [list(islice(texts(source, column), options.texts)) for column in source.columns]
    return translation_generator(writer(options.model, Translation, options.device)[0], pairs[0]), pairs[1]
