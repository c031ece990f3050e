"""Commands that ask a causal language model questions and score its answers: prompt, probe."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polyformer.cli.commands.options import Device, argument, device, option, parse_lengths, refuse
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.paths import is_replaceable
from polyformer.core.ranges import COUNT, NEW_TOKENS, NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.probing import ProbedModel, ProbeResult
    from polyformer.applications.prompting import Example, Sources, Template
    from polyformer.models.architectures import Transformer

PROMPT_EXAMPLES = """examples:
  polyformer prompt model.gguf questions.jsonl --shots 4 --examples train.jsonl --out answers.jsonl
  polyformer prompt model.gguf dev.tsv --examples train.tsv --header '[input, target]' --shots 4 \\
    --targets '{0: negative, 1: positive}' --template 'Review: {input}\\nSentiment: {target}' --limit 200
  polyformer prompt runs/demo-1 questions.txt --stop '.' --max-new-tokens 20
"""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options of `polyformer prompt`."""

    model: str = argument(
        "folder of a trained run of the task lm, or of a checkpoint with its tokenizer; or a GGUF file",
        metavar="RUN",
    )
    file: str = argument("file of questions: JSON lines, CSV, TSV, parquet or text", metavar="FILE")
    shots: NonNegativeInt = option("number of demonstrations before each question (default: 0)", 0)
    examples: str | None = option(
        "file to sample demonstrations from (default: FILE, whose other rows are the questions)",
        metavar="FILE",
    )
    template: str | None = option(
        r"format of a demonstration, with \n for a new line (default: 'Input: {input}\nOutput: "
        r"{target}')",
        metavar="TEXT",
    )
    separator: str = option(r"text between demonstrations (default: '\n\n')", r"\n\n", "TEXT")
    columns: str | None = option(
        "names of the columns input, target and choices in the files: '{input: text}'", metavar="NAMES"
    )
    header: str | None = option(
        "column names of a CSV or TSV file without a header line: '[input, target]'", metavar="NAMES"
    )
    format: str | None = option("format of the files, if their names do not show it")
    targets: str | None = option(
        "words that replace the targets and choices in the files: '{0: negative, 1: positive}'",
        metavar="WORDS",
    )
    choices: str | None = option(
        "choices of questions without choices in the file: '[yes, no]'", metavar="LIST"
    )
    normalize: Literal["none", "tokens", "bytes"] = option(
        "divide the log-likelihood of a choice by its number of tokens or bytes (default: none)", "none"
    )
    limit: PositiveInt | None = option(
        "largest number of questions, sampled with the seed (default: all)", most=COUNT
    )
    seed: NonNegativeInt = option("random seed of the samples (default: 0)", 0, most=COUNT)
    max_new_tokens: PositiveInt = option(
        "largest number of tokens of a generated answer (default: 32)", 32, most=NEW_TOKENS
    )
    stop: str = option(r"text that ends a generated answer (default: '\n')", r"\n", "TEXT")
    out: str | None = option(
        "write one line of JSON per question, with its answer", metavar="FILE", output="file"
    )
    device: Device = device()


def run_prompt(options: PromptOptions) -> None:
    """Answer the questions in a file with a causal language model and few-shot prompts.

    Each prompt consists of --shots demonstrations and the question, formatted by --template. A question with
    choices is answered by the most probable choice; the model generates the other answers up to --stop. The
    file has the columns input, target (if the answer is known) and choices (a list; in CSV separated by |).
    In plain text, each line is a question, with its answer after a tab. Prints the answers, or writes them to
    --out, and a table of metrics: for choices accuracy, macro F1 and the share of the most frequent target;
    for generated answers exact match and F1.
    """
    from polyformer.applications.prompting import read_examples, split_examples
    from polyformer.core.ops.cpu import model_threads
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks import LanguageModelling

    check(options)
    template, sources = template_of(options), sources_of(options)
    rows = read_examples(options.file, sources)
    others = None if options.examples is None else read_examples(options.examples, sources)
    shots, questions = split_examples(rows, others, options.shots, options.limit, options.seed)
    if len({bool(question.choices) for question in questions}) > 1:
        raise InputError(f"{options.file}: either all or no questions may have choices; split the file")
    task, model = writer(options.model, LanguageModelling, options.device)
    with model_threads(model):
        records = answer_questions(task, model, template, shots, questions, options)
    if options.out is None:
        print("".join(f"{' '.join(record['answer'].split())}\n" for record in records), end="")
    else:
        from polyformer.core.files import write_output

        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        write_output(options.out, "".join(f"{line}\n" for line in lines).encode())
    print_table(options, questions, [record["answer"] for record in records])


def check(options: PromptOptions) -> None:
    """Raise `InputError` if both files are the same, and if --out exists."""
    if options.examples is not None and Path(options.examples) == Path(options.file):
        raise InputError("--examples: expected another file than FILE; leave it out to sample from FILE")
    if options.out is not None and Path(options.out).is_file() and is_replaceable(Path(options.out)):
        raise InputError(f"--out: {options.out} already exists; choose another file")


def template_of(options: PromptOptions) -> "Template":
    """Return the template and its separator, with line breaks and tabs for \\n and \\t."""
    from polyformer.applications.prompting import Template

    form = {} if options.template is None else {"form": unescaped(options.template)}
    return Template(**form, separator=unescaped(options.separator))


def unescaped(text: str) -> str:
    """Return `text` with line breaks and tabs for \\n and \\t."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def sources_of(options: PromptOptions) -> "Sources":
    """Return the settings to read the files."""
    from polyformer.applications.prompting import Sources
    from polyformer.data import DataConfig

    DataConfig.from_dict({"format": options.format})  # refuses an unknown one
    words = {str(name): str(word) for name, word in yaml_option("targets", options.targets, dict).items()}
    choices = tuple(map(str, yaml_option("choices", options.choices, list)))
    if choices and (len({*choices}) < len(choices) or len(choices) < 2):
        raise InputError(f"--choices: expected two or more different choices, got {quote(options.choices)}")
    header = tuple(map(str, yaml_option("header", options.header, list))) or None
    columns = {str(role): str(name) for role, name in yaml_option("columns", options.columns, dict).items()}
    if stray := {*columns} - {"input", "target", "choices"}:
        raise InputError(f"--columns: expected names for input, target or choices, got {quote(stray.pop())}")
    chosen = choices or tuple(dict.fromkeys(words.values()))
    return Sources(options.format, header, columns, words, chosen if len(chosen) > 1 else ())


def yaml_option(name: str, text: str | None, kind: type) -> Any:
    """Return the YAML value of an option, a `kind` (dict or list); empty without the option."""
    from polyformer.core.parsing import parse_yaml

    value = kind() if text is None else parse_yaml(text, f"--{name}")
    if not isinstance(value, kind):
        example = "'{0: negative, 1: positive}'" if kind is dict else "'[yes, no]'"
        raise InputError(f"--{name}: expected {'a mapping' if kind is dict else 'a list'}, as in {example}")
    return value


def answer_questions(
    task: Any,
    model: "Transformer",
    template: "Template",
    shots: "Sequence[Example]",
    questions: "Sequence[Example]",
    options: PromptOptions,
) -> list[dict[str, Any]]:
    """Return a record per question: its input, target and answer, and the scores of its choices."""
    from polyformer.applications.prompting import choose_answers, continuations, write_answers

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
    model: "Transformer", rows: "Sequence[Sequence[int]]", options: PromptOptions, new_tokens: int = 0
) -> None:
    """Raise `InputError` if a prompt has more tokens than the model supports."""
    from polyformer.models.config import max_positions

    limit, most = max_positions(model.config), max(map(len, rows)) + new_tokens
    if limit is not None and most > limit:
        raise InputError(
            f"--shots: a prompt of {options.shots} demonstrations has {most} tokens with its answer, and "
            f"{options.model} supports {limit}; use fewer or shorter demonstrations"
        )


def print_table(options: PromptOptions, questions: "Sequence[Example]", answers: list[str]) -> None:
    """Print the metrics of the questions with a known target, if there are any."""
    from polyformer.applications.prompting import choice_metrics, text_metrics
    from polyformer.training.recipes.report import table

    scored = [(answer, q.target) for answer, q in zip(answers, questions) if q.target is not None]
    if not scored:
        return
    metrics = choice_metrics if questions[0].choices else text_metrics
    values = metrics([answer for answer, _ in scored], [target for _, target in scored])
    print(table([(f"{options.file}, {options.shots} shots", values)]))


PROBE_EXAMPLES = """examples:
  polyformer probe model.gguf --lengths 512,1024,4096
  polyformer probe converted/ --tasks niah_single_2,vt --lengths 4096 --samples 50 --out probe.json
  polyformer probe runs/demo-1 --lengths 2048 --text squad-dev.json --tasks qa
  polyformer probe model.gguf --lengths 2048 --tasks niah_single_1 --cache "snapkv(budget=512)"
  polyformer probe model.gguf --template '<|im_start|>user\\n{prompt}<|im_end|>\\n<|im_start|>assistant\\n'
"""

LONGEST = 4096
"""Largest default length."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Options of `polyformer probe`."""

    model: str = argument(
        "folder of a trained run of the task lm, or of a checkpoint with its tokenizer; or a GGUF file",
        metavar="MODEL",
    )
    lengths: str | None = option(
        "tokens of a prompt with its answer (default: 512, 1024, 2048 and 4096, as far as the model was "
        "trained for them)",
        metavar="N,N,...",
    )
    tasks: str | None = option(
        "names of tasks, separated by commas (default: all; qa requires questions in --text)",
        metavar="NAME,NAME,...",
    )
    samples: PositiveInt = option("prompts per task and length (default: 20)", 20, most=COUNT)
    seed: NonNegativeInt = option("random seed of the prompts (default: 0)", 0, most=COUNT)
    text: str | None = option(
        "text to hide needles in; with questions in SQuAD's format, also for qa (default: the default text)",
        metavar="FILE",
    )
    format: str | None = option("format of --text, if its name does not show it")
    template: str = option(
        r"format of a prompt, for example of the messages of an instruction-tuned model, with \n for a new "
        "line (default: {prompt})",
        "{prompt}",
        metavar="TEXT",
    )
    shots: NonNegativeInt = option("small solved samples before each prompt (default: 0)", 0)
    max_new_tokens: PositiveInt | None = option(
        "largest number of tokens of an answer (default: as in RULER, 30 to 128 by task)"
    )
    batch_tokens: PositiveInt = option(
        "tokens that are read at once, at least one prompt (default: 8192)", 8192
    )
    cache: str | None = option(
        "policy of the KV cache, such as 'snapkv(budget=512)', which drops keys after the prompt, or 'int8' "
        "(default: all keys, as computed)",
        metavar="POLICY",
    )
    out: str | None = option(
        "write scores, prompt lengths and answers to this JSON file", metavar="FILE", output="file"
    )
    device: Device = device()


def run_probe(options: ProbeOptions) -> None:
    """Probe whether a causal language model still finds information in long texts.

    The tasks are RULER's (Hsieh et al. 2024), generated from the seed. niah_* (needles in a haystack) hide
    numbers for keys in a text and ask for some of them: single, multikey (other keys are in the way),
    multivalue (several numbers of a key) and multiquery (several keys). vt tracks variables through
    assignments, cwe finds the most common words of a list, fwe the most frequent made-up words, qa answers
    questions about a paragraph among others. Prompts fill --lengths tokens of the model's tokenizer, together
    with the answer, and are never cut: a length that the model or a task does not support is an error. Prints
    the mean score of each task and length in percent: the share of the expected answers that the generated
    text contains.
    """
    from polyformer.applications.probing import ProbeConfig, PromptFormat, probe, read_text, score_table
    from polyformer.core.files import write_output
    from polyformer.core.ops.cpu import model_threads

    text = read_text(options.text, options.format)
    names = task_names_of(options, text)
    format = PromptFormat(unescaped(options.template), options.shots)
    config = ProbeConfig(options.samples, options.seed, format, options.max_new_tokens)
    module, model = load(options)
    lengths = lengths_of(options, module.config)
    with model_threads(module):
        results = probe(model, names, lengths, text, config, Progress())
    print(score_table(results))
    if options.out is not None:
        record = {
            "model": options.model,
            "text": options.text,
            "samples": options.samples,
            "seed": options.seed,
            "template": options.template,
            "shots": options.shots,
            "max_new_tokens": options.max_new_tokens,
            "cache": options.cache,
            "results": [result.to_dict() for result in results],
        }
        write_output(options.out, (json.dumps(record, ensure_ascii=False, indent=1) + "\n").encode())


class Progress:
    """Prints the score of a task and length to standard error when it is known."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def __call__(self, result: "ProbeResult") -> None:
        """Print a line."""
        seconds, self.start = time.perf_counter() - self.start, time.perf_counter()
        print(
            f"{result.task} at {result.length:,} tokens: {100 * result.score:.1f} ({seconds:.0f} s)",
            file=sys.stderr,
            flush=True,
        )


def load(options: ProbeOptions) -> "tuple[Any, ProbedModel]":
    """Return the model and the prober's view of it: of this library, or else of transformers."""
    from polyformer.applications.probing import ProbedModel
    from polyformer.applications.retrieval.readers import foreign, open_reader
    from polyformer.training.recipes.reader import Writer
    from polyformer.training.recipes.run import writer
    from polyformer.training.tasks import LanguageModelling

    if foreign(Path(options.model)):
        refuse(
            options, ("cache",), f"not available for {options.model}, which transformers runs; leave it out"
        )
        reader: Any = open_reader(options.model, options.device)
        return reader.model, ProbedModel.of(reader.model, reader.tokenizer)
    task, model = writer(options.model, LanguageModelling, options.device)
    # A checkpoint's own `start` refuses prompts that are too long, and filling a prompt tries such.
    start = None if isinstance(task, Writer) else task.start
    return model, ProbedModel.of(model, task.tokenizer, start, options.batch_tokens, options.cache)


def task_names_of(options: ProbeOptions, text: Any) -> list[str]:
    """Return the names of --tasks without repetitions; raise `InputError` for an unknown name."""
    from polyformer.applications.probing import TASKS, find_task, task_names

    if options.tasks is None:
        return task_names(text)
    names = list(dict.fromkeys(name.strip() for name in options.tasks.split(",")))
    for name in names:
        if name not in TASKS:
            raise unknown("--tasks", name, TASKS)
        find_task(name, LONGEST, text)
    return names


def lengths_of(options: ProbeOptions, config: Any) -> list[int]:
    """Return the lengths of --lengths, or the default for a model's `config`."""
    if options.lengths is not None:
        return parse_lengths(options.lengths)
    most = getattr(config, "max_position_embeddings", None) or LONGEST
    return [length for length in (512, 1024, 2048, LONGEST) if length <= most] or [most]
