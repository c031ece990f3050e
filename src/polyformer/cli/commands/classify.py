"""Classify texts or images with a trained model.

The inputs are arguments, a file (--file), or the lines of standard input. Prints for each input the most
probable label, a tab, and its probability (0 to 1). An image is given by its file name and scaled to the
model's image size. A model of text pairs reads the second text from --pair, or after a tab in each line. A
checkpoint does not show whether it expects pairs: if every line contains one tab, the lines are read as
pairs, and a note on standard error says so.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.input_lines import input_lines, split_at_tabs, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option, refuse
from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.training.tasks import ImageClassification

EXAMPLES = """examples:
  polyformer classify runs/sst2-1 "a gripping, funny film" "two hours too long"
  polyformer classify runs/sst2-1 --file review.txt
  polyformer classify runs/sst2-1 --lines < reviews.txt     # a review on each line
  polyformer classify runs/mnist-1 seven.png nine.jpg
  polyformer classify runs/qnli-1 "Who wrote Faust?" --pair "Goethe finished it in 1831."
"""


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of `polyformer classify`."""

    run: str = argument(
        "folder of a trained run of the task classify, classify_pair or classify_image, or of a checkpoint "
        "with such a head",
        metavar="RUN",
    )
    text: tuple[str, ...] = argument(
        "texts, each in quotes, or image files (default: every line of standard input)", (), "TEXT|IMAGE"
    )
    file: str | None = text_file()
    lines: bool = text_lines()
    pair: str | None = option("for models of text pairs: the second text of every pair", metavar="TEXT")
    device: Device = device()


def run(options: ClassifyOptions) -> None:
    """Print labels and probabilities."""
    from polyformer.core.ops.cpu_threads import model_threads
    from polyformer.training.recipes.classifier import image_classifier
    from polyformer.training.recipes.reader import Reader
    from polyformer.training.recipes.run import reader
    from polyformer.training.tasks import Classification, PairClassification

    images = image_classifier(options.run, options.device)
    if images is not None:
        if options.pair is not None:
            raise InputError("--pair: only for models of texts, and this model reads images; leave it out")
        with model_threads(images[1]):
            for files in image_files(options):
                report(classified_images(*images, files))
        return
    task, model = reader(options.run, Classification, options.device)
    by_line = not options.text and (options.lines or options.file is None) and options.pair is None
    tabs, unknown = (by_line and isinstance(task, kind) for kind in (PairClassification, Reader))
    with model_threads(model):
        for lines in input_lines(options.text, options.file, options.lines):
            if unknown and all(line.count("\t") == 1 for line in lines):
                print(
                    "polyformer: each line contains one tab and is read as a pair of texts", file=sys.stderr
                )
                tabs = True
            unknown = False
            texts, pairs = split_at_tabs(lines) if tabs else (lines, None)
            if options.pair is not None:
                pairs = [options.pair] * len(texts)
            report(task.classify(model, texts, pairs))
            while isinstance(task, Classification) and task.notes:
                print(f"polyformer: {task.notes.pop(0)}", file=sys.stderr)


def report(results: Iterable[dict[str, float]]) -> None:
    """Print the most probable label of each result and its probability."""
    for shares in results:
        label = max(shares, key=lambda name: shares[name])
        print(f"{label}\t{shares[label]:.4f}", flush=True)


def image_files(options: ClassifyOptions) -> Iterator[list[str]]:
    """Return the names of image files: the arguments, --file, or lines."""
    if options.text:
        refuse(options, ("file", "lines"), "not available with images as arguments; leave out one of them")
        return iter([list(options.text)])
    if options.file is not None and not options.lines:
        return iter([[options.file]])
    return input_lines((), options.file, lines=True)


def classified_images(task: "ImageClassification", model: Any, files: list[str]) -> list[dict[str, float]]:
    """Return the probability of each label for each file; raise `InputError` for a file that is no image."""
    from polyformer.data import read
    from polyformer.data.image_decoding import SUFFIXES
    from polyformer.training.recipes.classifier import brought

    for file in files:
        if not file.lower().endswith(SUFFIXES):
            raise InputError(
                "IMAGE: this model reads images; expected a file name that ends with one of "
                f"{', '.join(SUFFIXES)}, got {quote(file)}; to evaluate a folder use polyformer evaluate RUN "
                "--data FOLDER"
            )
    rows: list[Any] = [next(iter(read(brought(task), ("image", "height", "width"), file))) for file in files]
    return task.classify(model, rows)
