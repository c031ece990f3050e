"""Commands that apply a trained model to texts: classify, tag, translate, answer, choose.

Each reads its texts as `inputs` describes, calls a method of a loaded model (`polyformer.load`), and prints
a line or more per text, as soon as its batch is computed.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyformer.cli.commands.inputs import input_lines, split_at_tabs, text_file, text_lines
from polyformer.cli.commands.options import Device, argument, device, option, refuse, set_options
from polyformer.core.errors import InputError

CLASSIFY_EXAMPLES = """examples:
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


def run_classify(options: ClassifyOptions) -> None:
    """Classify texts or images with a trained model.

    The inputs are arguments, a file (--file), or the lines of standard input. Prints for each input the most
    probable label, a tab, and its probability (0 to 1), or the number of a regression. An image is given by
    its file name and scaled to the model's image size. A model of text pairs reads the second text from
    --pair, or after a tab in each line. A checkpoint does not show whether it expects pairs: if every line
    contains one tab, the lines are read as pairs, and a note on standard error says so. A model of texts and
    images, such as CLIP, classifies images or folders of images by the names of any labels (--labels) without
    training.
    """
    from polyformer.applications.loaded import TextsAndImages, load_for
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


TAG_EXAMPLES = """examples:
  polyformer tag runs/wnut17-1 "Anna flew from Paris to Oslo ."
  polyformer tag runs/wnut17-1 --file article.txt
  polyformer tag runs/wnut17-1 --lines < sentences.txt > tagged.conll
"""


@dataclass(frozen=True, kw_only=True)
class TagOptions:
    """Options of `polyformer tag`."""

    run: str = argument(
        "folder of a trained run of the task tag, or of a checkpoint with a tagging head", metavar="RUN"
    )
    text: tuple[str, ...] = argument(
        "texts to tag, each in quotes (default: every line of standard input)", ()
    )
    file: str | None = text_file()
    lines: bool = text_lines()
    device: Device = device()


def run_tag(options: TagOptions) -> None:
    """Tag the words of texts with a trained model.

    The texts are arguments, a file (--file), or the lines of standard input. Prints one line per word: the
    word, a tab, its tag; and an empty line after each text (the CoNLL format).
    """
    from polyformer.applications.loaded import load_for
    from polyformer.core.ops.cpu import model_threads

    loaded = load_for(options.run, "tag", options.device)
    with model_threads(loaded.model):
        for texts in input_lines(options.text, options.file, options.lines):
            for tagged in loaded.tag(texts):
                print("".join(f"{word}\t{tag}\n" for word, tag in tagged), flush=True)


TRANSLATE_EXAMPLES = """examples:
  polyformer translate runs/multi30k-1 "Two dogs are running through the snow." "A man is reading."
  polyformer translate runs/multi30k-1 --num-beams 1 --lines < english.txt > german.txt
  polyformer translate runs/summarize-1 --file article.txt
  polyformer translate runs/summarize-1 --file articles.txt --lines     # an article on each line
  polyformer translate m2m100 --source-language en --target-language de "Two dogs are running."
"""


@dataclass(frozen=True, kw_only=True)
class TranslateOptions:
    """Options of `polyformer translate`."""

    run: str = argument(
        "folder of a run of the task translate, summarize or extract, or of an encoder-decoder checkpoint",
        metavar="RUN",
    )
    text: tuple[str, ...] = argument(
        "texts to translate, each in quotes (default: every line of standard input)", ()
    )
    file: str | None = text_file()
    lines: bool = text_lines()
    num_beams: int | None = option(
        "number of beams; 1 is greedy decoding (default: as in the run's recipe or the checkpoint)"
    )
    source_language: str | None = option(
        "for multilingual checkpoints: code of the texts' language, such as en", metavar="CODE"
    )
    target_language: str | None = option(
        "for multilingual checkpoints: code of the language to translate into", metavar="CODE"
    )
    device: Device = device()


def run_translate(options: TranslateOptions) -> None:
    """Translate or summarize texts with a trained model.

    The texts are arguments, a file (--file), or the lines of standard input. A run writes for each text the
    kind of output that it was trained on: a translation, a generated summary, or the sentences that summarize
    it.
    """
    from polyformer.applications.loaded import load_for
    from polyformer.core.ops.cpu import model_threads

    loaded = load_for(options.run, "translate", options.device)
    settings = set_options(options, ("num_beams", "source_language", "target_language"))
    with model_threads(loaded.model):
        for texts in input_lines(options.text, options.file, options.lines):
            print("\n".join(loaded.predict(texts, **settings)), flush=True)


ANSWER_EXAMPLES = """examples:
  polyformer answer runs/squad-1 article.txt "Who wrote it?" "When?"
  polyformer answer runs/squad-1 article.txt --file questions.txt --lines
"""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Options of `polyformer answer`."""

    run: str = argument(
        "folder of a trained run of the task qa, or of a checkpoint with a span head", metavar="RUN"
    )
    source: str = argument("file with the text that contains the answers", metavar="FILE")
    text: tuple[str, ...] = argument(
        "questions, each in quotes (default: every line of standard input)", (), "QUESTION"
    )
    file: str | None = text_file("QUESTION")
    lines: bool = text_lines()
    device: Device = device()


def run_answer(options: AnswerOptions) -> None:
    """Answer questions about a text with a trained model.

    The questions are arguments, a file (--file), or the lines of standard input. Prints one answer per line,
    an excerpt of the text, or an empty line if the model finds no answer.
    """
    from polyformer.applications.loaded import Verbatim, load_for
    from polyformer.core.ops.cpu import model_threads
    from polyformer.data.sources.files import whole_text

    context = Verbatim(whole_text(Path(options.source)))
    loaded = load_for(options.run, "answer", options.device)
    with model_threads(loaded.model):
        for questions in input_lines(options.text, options.file, options.lines):
            for answer in loaded.answer(questions, context):
                print(" ".join(answer.split()), flush=True)


CHOOSE_EXAMPLES = """examples:
  polyformer choose runs/swag-1 "She opens the oven and" --choices '["takes out a cake.", "dives in."]'
  polyformer choose runs/swag-1 --lines < questions.tsv
"""


@dataclass(frozen=True, kw_only=True)
class ChooseOptions:
    """Options of `polyformer choose`."""

    run: str = argument(
        "folder of a trained run of the task choose, or of a multiple-choice checkpoint", metavar="RUN"
    )
    text: tuple[str, ...] = argument(
        "questions, each in quotes (default: every line of standard input)", (), "QUESTION"
    )
    file: str | None = text_file("QUESTION")
    lines: bool = text_lines()
    choices: str | None = option("choices for all questions, a JSON list", metavar="LIST")
    device: Device = device()


def run_choose(options: ChooseOptions) -> None:
    """Choose one of several answers to each question with a trained model.

    The questions are arguments, a file (--file), or the lines of standard input. Prints for each question the
    most probable choice, a tab, and its probability (0 to 1). A line contains a question and its choices,
    separated by tabs; with --choices, which then apply to all questions, it contains only the question.
    """
    from polyformer.applications.loaded import Verbatim, load_for
    from polyformer.core.ops.cpu import model_threads
    from polyformer.data.formats.columns import listed

    choices: Any = None
    if options.choices is not None:
        choices = [*map(Verbatim, listed(options.choices, "--choices"))]
    loaded = load_for(options.run, "choose", options.device)
    with model_threads(loaded.model):
        for lines in input_lines(options.text, options.file, options.lines):
            questions = [_question(line, choices) for line in lines]
            texts, lists = [text for text, _ in questions], [own for _, own in questions]
            for result in loaded.choose(texts, lists):
                print(f"{result.choice}\t{result.probability:.4f}", flush=True)


def _question(line: str, choices: list[str] | None) -> tuple[str, list[str]]:
    from polyformer.core.errors import InputError, quote

    if choices is not None:
        return line, choices
    text, *own = line.split("\t")
    if len(own) < 2:
        raise InputError(
            "QUESTION: expected a question and two or more choices separated by tabs, or --choices, got "
            f"{quote(line)}"
        )
    return text, own
