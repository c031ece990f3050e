"""Classify texts or images with a trained model.

The inputs are arguments, a file (--file), or the lines of standard input. Prints for each input the most
probable label, a tab, and its probability (0 to 1), or the number of a regression. An image is given by its
file name and scaled to the model's image size. A model of text pairs reads the second text from --pair, or
after a tab in each line. A checkpoint does not show whether it expects pairs: if every line contains one tab,
the lines are read as pairs, and a note on standard error says so. A model of texts and images, such as CLIP,
classifies images or folders of images by the names of any labels (--labels) without training.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polyformer.cli.commands.input_lines import input_lines, split_at_tabs, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option, refuse
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer classify runs/sst2-1 "a gripping, funny film" "two hours too long"
  polyformer classify runs/sst2-1 --file review.txt
  polyformer classify runs/sst2-1 --lines < reviews.txt     # a review on each line
  polyformer classify runs/mnist-1 seven.png nine.jpg
  polyformer classify clip-vit-base-patch32 photos/ --labels "cat, dog, garden"
  polyformer classify runs/qnli-1 "Who wrote Faust?" --pair "Goethe finished it in 1831."
"""


@dataclass(frozen=True, kw_only=True)
class ClassifyOptions:
    """Options of `polyformer classify`."""

    run: str = argument(
        "folder of a trained run of the task classify, classify_pair, classify_image or regress_pair, or of "
        "a checkpoint with such a head",
        metavar="RUN",
    )
    text: tuple[str, ...] = argument(
        "texts, each in quotes, or image files (default: every line of standard input)", (), "TEXT|IMAGE"
    )
    file: str | None = text_file()
    lines: bool = text_lines()
    pair: str | None = option("for models of text pairs: the second text of every pair", metavar="TEXT")
    labels: str | None = option(
        "for models of texts and images: names of labels, separated by commas", metavar="NAMES"
    )
    device: Device = device()


def run(options: ClassifyOptions) -> None:
    """Print labels and probabilities, or the numbers of a regression."""
    from polyformer.applications.loaded import load_for
    from polyformer.applications.loaded.towers import TextsAndImages
    from polyformer.core.ops.cpu import model_threads

    loaded: Any = load_for(options.run, "classify", options.device)
    if isinstance(loaded, TextsAndImages):
        loaded = loaded.with_labels(options.labels)
    elif options.labels is not None:
        raise InputError("--labels: this model has labels of its own; leave it out")
    with model_threads(loaded.model):
        for inputs in texts(options, loaded.pairs) if loaded.reads_text else images(options):
            for result in loaded.predict(inputs):
                print(shown(result, loaded.labels), flush=True)


def shown(result: Any, labels: tuple[str, ...]) -> str:
    """Return the line for a result: a label and its probability, a number, or numbers by label."""
    if isinstance(result, float):
        result = dict.fromkeys(labels, result) or f"{result:.4f}"
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        return "\t".join(f"{name}\t{number:.4f}" for name, number in result.items())
    return f"{result.label}\t{result.probability:.4f}"


def texts(options: ClassifyOptions, pairs: bool | None) -> Iterator[list[Any]]:
    """Yield texts or pairs of texts; `pairs`: which of them the model reads, None if it does not show."""
    from polyformer.applications.loaded import Verbatim

    by_line = not options.text and (options.lines or options.file is None) and options.pair is None
    tabs = by_line and pairs is True
    for number, lines in enumerate(input_lines(options.text, options.file, options.lines)):
        if by_line and pairs is None and not number and all(line.count("\t") == 1 for line in lines):
            print("polyformer: each line contains one tab and is read as a pair of texts", file=sys.stderr)
            tabs = True
        if options.pair is not None:
            yield [(line, Verbatim(options.pair)) for line in lines]
        else:
            yield list(zip(*split_at_tabs(lines))) if tabs else lines


def images(options: ClassifyOptions) -> Iterator[list[str]]:
    """Yield the names of image files: the arguments, --file, or lines."""
    if options.pair is not None:
        raise InputError("--pair: only for models of texts, and this model reads images; leave it out")
    if options.text:
        refuse(options, ("file", "lines"), "not available with images as arguments; leave out one of them")
        return iter([list(options.text)])
    if options.file is not None and not options.lines:
        return iter([[options.file]])
    return input_lines((), options.file, lines=True)
