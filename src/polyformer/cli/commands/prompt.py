"""Answer the questions in a file with a causal language model that is not trained on them (few-shot prompts).

Each question follows --shots demonstrations, all formatted by --template. The answer to a question with
choices is the likeliest choice; otherwise the model generates the answer, up to --stop. A file has the
columns input, target (if the answer is known) and choices (a list; in CSV separated by |). In a plain text
each line is a question, with its answer after a tab. Prints each answer, or writes all of them to --out, and
a table: accuracy, macro F1 and the accuracy of always choosing the most frequent target; exact match and F1
of generated answers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import Device, argument, device, option
from polyformer.core.destinations import is_replaceable
from polyformer.core.errors import InputError, quote
from polyformer.core.limits import COUNT, NEW_TOKENS

if TYPE_CHECKING:
    from polyformer.applications.prompting import Example, Sources, Template
    from polyformer.models.architectures import Transformer

EXAMPLES = """examples:
  polyformer prompt model.gguf questions.jsonl --shots 4 --examples train.jsonl --out answers.jsonl
  polyformer prompt model.gguf dev.tsv --examples train.tsv --header '[input, target]' --shots 4 \\
    --targets '{0: negative, 1: positive}' --template 'Review: {input}\\nSentiment: {target}' --limit 200
  polyformer prompt runs/demo-1 questions.txt --stop '.' --max-new-tokens 20
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer prompt` takes."""

    model: str = argument(
        "folder of a trained run of the task lm, or of a checkpoint with its tokenizer; or a GGUF file",
        metavar="RUN",
    )
    file: str = argument("the questions: JSON lines, CSV, TSV, parquet or text", metavar="FILE")
    shots: int = option("demonstrations before each question (default: 0)", 0)
    examples: str | None = option(
        "draw demonstrations from this file (default: from FILE, and the other rows are the questions)",
        metavar="FILE",
    )
    template: str | None = option(
        r"a demonstration, \n for a new line (default: 'Input: {input}\nOutput: {target}')", metavar="TEXT"
    )
    separator: str = option(r"text between two demonstrations (default: '\n\n')", r"\n\n", "TEXT")
    columns: str | None = option(
        "names of the columns input, target and choices in the files: '{input: text}'", metavar="NAMES"
    )
    header: str | None = option(
        "the columns of a CSV or TSV file without a heading: '[input, target]'", metavar="NAMES"
    )
    format: str | None = option("format of the files if their names do not show it")
    targets: str | None = option(
        "words that replace the targets in the files, and choices: '{0: negative, 1: positive}'",
        metavar="WORDS",
    )
    choices: str | None = option("choices for questions without choices: '[yes, no]'", metavar="LIST")
    normalize: Literal["none", "tokens", "bytes"] = option(
        "divide the log-likelihood of a choice by its number of tokens or bytes (default: none)", "none"
    )
    limit: int | None = option("number of questions, drawn by the seed (default: all)", most=COUNT)
    seed: int = option("seed of the random choices (default: 0)", 0, most=COUNT)
    max_new_tokens: int = option("maximum tokens of a generated answer (default: 32)", 32, most=NEW_TOKENS)
    stop: str = option(r"text that ends a generated answer (default: '\n')", r"\n", "TEXT")
    out: str | None = option(
        "write a line of JSON for each question, with its answer", metavar="FILE", output="file"
    )
    device: Device = device()


def run(options: Options) -> None:
    """Print answers and the table."""
    from polyformer.applications.prompting import read_examples, split_examples
    from polyformer.core.ops.workers import suited
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks import LanguageModelling

    check(options)
    template, sources = template_of(options), sources_of(options)
    rows = read_examples(options.file, sources)
    others = None if options.examples is None else read_examples(options.examples, sources)
    shots, questions = split_examples(rows, others, options.shots, options.limit, options.seed)
    if len({bool(question.choices) for question in questions}) > 1:
        raise InputError(f"{options.file}: some questions have choices and others none; ask them apart")
    task, model = writer(options.model, LanguageModelling, options.device)
    with suited(model):
        records = answered(task, model, template, shots, questions, options)
    if options.out is None:
        print("".join(f"{' '.join(record['answer'].split())}\n" for record in records), end="")
    else:
        from polyformer.core.files import write_output

        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        write_output(options.out, "".join(f"{line}\n" for line in lines).encode())
    print_table(options, questions, [record["answer"] for record in records])


def check(options: Options) -> None:
    """Raises `InputError` for numbers out of range, and for a file of answers that would replace another."""
    for name, least in (("shots", 0), ("seed", 0), ("limit", 1), ("max_new_tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name.replace('_', '-')}: expected {least} or more, got {value}")
    if options.examples is not None and Path(options.examples) == Path(options.file):
        raise InputError("--examples: names the file of the questions; leave it out to draw from that one")
    if options.out is not None and Path(options.out).is_file() and is_replaceable(Path(options.out)):
        raise InputError(f"--out: {options.out} is there already; name another file")


def template_of(options: Options) -> "Template":
    """The template and its separator, with line breaks and tabs in the place of \\n and \\t."""
    from polyformer.applications.prompting import Template

    form = {} if options.template is None else {"form": unescaped(options.template)}
    return Template(**form, separator=unescaped(options.separator))


def unescaped(text: str) -> str:
    """`text` with line breaks and tabs as they are typed on a command line."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def sources_of(options: Options) -> "Sources":
    """How the files are read."""
    from polyformer.applications.prompting import Sources
    from polyformer.data import DataConfig

    DataConfig.from_dict({"format": options.format})  # refuses an unknown one
    words = {str(name): str(word) for name, word in parsed("targets", options.targets, dict).items()}
    choices = tuple(map(str, parsed("choices", options.choices, list)))
    if choices and (len({*choices}) < len(choices) or len(choices) < 2):
        raise InputError(f"--choices: expected two or more different ones, got {quote(options.choices)}")
    header = tuple(map(str, parsed("header", options.header, list))) or None
    columns = {str(role): str(name) for role, name in parsed("columns", options.columns, dict).items()}
    if stray := {*columns} - {"input", "target", "choices"}:
        raise InputError(f"--columns: expected names for input, target or choices, got {quote(stray.pop())}")
    chosen = choices or tuple(dict.fromkeys(words.values()))
    return Sources(options.format, header, columns, words, chosen if len(chosen) > 1 else ())


def parsed(name: str, text: str | None, kind: type) -> Any:
    """The YAML of an option, a `kind` (dict or list); an empty one where it was not given."""
    from polyformer.core.parsing import parse_yaml

    value = kind() if text is None else parse_yaml(text, f"--{name}")
    if not isinstance(value, kind):
        example = "'{0: negative, 1: positive}'" if kind is dict else "'[yes, no]'"
        raise InputError(f"--{name}: expected {'a mapping' if kind is dict else 'a list'}, as in {example}")
    return value


def answered(
    task: Any,
    model: "Transformer",
    template: "Template",
    shots: "Sequence[Example]",
    questions: "Sequence[Example]",
    options: Options,
) -> list[dict[str, Any]]:
    """A record for each question: its input, target and answer, and the score of each choice."""
    from polyformer.applications.prompting import choose_answers, write_answers
    from polyformer.applications.prompting.scoring import continuations

    context = template.demonstrations(shots)
    records = [{"input": question.input, "target": question.target} for question in questions]
    if questions[0].choices:
        rows = [continuations(task.start, context, template, question) for question in questions]
        check_lengths(model, [row.ids for several in rows for row in several], options)
        for record, scores in zip(records, choose_answers(model, rows, questions, options.normalize)):
            record |= {"answer": max(scores, key=lambda choice: scores[choice]), "scores": scores}
        return records
    prompts = [task.start(context + template.question(question)) for question in questions]
    check_lengths(model, prompts, options, options.max_new_tokens)
    answers = write_answers(
        model,
        prompts,
        task.tokenizer.decode,
        stop=unescaped(options.stop),
        max_new_tokens=options.max_new_tokens,
    )
    return [{**record, "answer": answer} for record, answer in zip(records, answers)]


def check_lengths(
    model: "Transformer", rows: "Sequence[Sequence[int]]", options: Options, room: int = 0
) -> None:
    """Raises `InputError` where a prompt has more tokens than the model takes."""
    from polyformer.training.recipes.reader import max_positions

    limit, most = max_positions(model.config), max(map(len, rows)) + room
    if limit is not None and most > limit:
        raise InputError(
            f"--shots: a prompt of {options.shots} demonstrations has {most} tokens with its answer, and "
            f"{options.model} takes {limit}; take fewer, or shorter ones"
        )


def print_table(options: Options, questions: "Sequence[Example]", answers: list[str]) -> None:
    """Print the metrics of the questions whose target is known, if there are any."""
    from polyformer.applications.prompting import choice_metrics, text_metrics
    from polyformer.training.recipes.report import table

    scored = [(answer, q.target) for answer, q in zip(answers, questions) if q.target is not None]
    if not scored:
        return
    metrics = choice_metrics if questions[0].choices else text_metrics
    values = metrics([answer for answer, _ in scored], [target for _, target in scored])
    print(table([(f"{options.file}, {options.shots} shots", values)]))
