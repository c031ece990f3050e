"""Find a sparse attention pattern for each head of a trained model, under a budget of query-key pairs.

Runs the dense model on a text, forward and backward, and measures for each head how much each of a list of
patterns would change the loss: windows with and without first tokens, strides, blocks with random blocks, all
keys. Then chooses the patterns with the least total error that compute at most --budget of the pairs of dense
attention. No weight changes. The result is an expression for `polyformer convert --attention`, `attach` and
`from_pretrained`. It fits texts of --length tokens: shorter texts are computed more densely.

With --evaluate, compares the dense model with the pattern at every budget: perplexity (of masked tokens for
an encoder; for an embedding model the similarity of its vectors), speed, and with --recall whether a decoder
finds numbers hidden in the text. Use a text that is not in --text.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Interval

from polyformer.cli.commands.model_and_texts import load, token_rows
from polyformer.cli.commands.options import Device, argument, device, option, parse_numbers
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.pattern_fitting import FittedPattern
    from polyformer.cli.commands.before_after import Comparison
    from polyformer.models.architectures import Transformer

EXAMPLES = """examples:
  polyformer fit-pattern smollm2.gguf --text valid.txt --budget 0.25 --out pattern.txt
  polyformer convert smollm2.gguf sparse --attention "$(cat pattern.txt)"
  polyformer fit-pattern minilm-dir --text notes.txt --length 512 --texts 8 --figure heads.png
  polyformer fit-pattern smollm2.gguf --text valid.txt --budget 0.05,0.1,0.25 --evaluate test.txt --recall 20
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
    recall: PositiveInt | None = option(
        "with --evaluate, for a decoder: also hide N numbers in the text, and report the share that the "
        "models find, as `polyformer probe` with the task niah_single_2"
    )
    device: Device = device()


def run(options: FitPatternOptions) -> None:
    """Print a table for each budget and the pattern, and write the files."""
    from polyformer.applications.pattern_fitting import candidates, check_budget, fit_pattern, head_errors
    from polyformer.core.files import write_output
    from polyformer.core.ops.cpu_threads import model_threads
    from polyformer.data.compressed_files import opened

    if options.recall is not None and options.evaluate is None:
        raise InputError("--recall: requires --evaluate TEXT")
    budgets = parse_numbers("--budget", options.budget)
    # The measurement takes minutes, so a wrong option is an error before it.
    for budget in budgets:
        check_budget(budget)
    source = load(options.model, options.text, options.device)
    length = options.length or min(source.model.config.max_position_embeddings, LONGEST)
    text = None
    if options.evaluate is not None:
        with opened(Path(options.evaluate)) as file:
            text = file.read(32 * max(options.tokens, length))
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
    results = [] if text is None else list(compared(options, source.model, length, fits, text))
    if options.figure is not None:
        from polyformer.cli.plots.fitted_pattern import draw_fit

        draw_fit(fits, results, Path(options.model).name, Path(options.figure), write_output)
        print(f"drawn in {options.figure}")


def show(budget: float, fitted: "FittedPattern") -> None:
    """Print how many heads got each pattern, and what these heads lost."""
    from rich.console import Console
    from rich.table import Table

    from polyformer.cli.plots.fitted_pattern import short_text

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


def compared(
    options: FitPatternOptions, model: "Transformer", length: int, fits: "list[FittedPattern]", text: str
) -> "Iterator[Comparison]":
    """Yield the comparison of dense attention with each fit on `text`, and print it as a row of a table."""
    from dataclasses import replace
    from functools import partial

    from polyformer.applications.probing import read_text
    from polyformer.cli.commands.before_after import compare, comparison_table
    from polyformer.cli.commands.recall import recall
    from polyformer.data.tokenizer_loading import load_tokenizer
    from polyformer.models.checkpoints import convert

    assert options.evaluate is not None
    tokenizer = load_tokenizer(options.model)
    ids = tokenizer.encode(text)
    for fitted in fits:
        sparse, _ = convert(model, fitted.pattern)
        (row,) = compare(model, sparse, tokenizer, ids, [length], options.tokens)
        if options.recall is not None:
            find = partial(recall, tokenizer, read_text(options.evaluate, "text"), options.recall)
            row = replace(row, recall=(find(model, length), find(sparse, length)))
        heading, *lines = comparison_table([row])
        print("\n".join([f"\n{fitted.share:.2%} of the pairs, dense -> sparse:", heading, *lines]))
        yield row
