"""Probe whether a causal language model still finds information in long texts.

The tasks are RULER's (Hsieh et al. 2024), generated from the seed. niah_* (needles in a haystack) hide
numbers for keys in a text and ask for some of them: single, multikey (other keys are in the way), multivalue
(several numbers of a key) and multiquery (several keys). vt tracks variables through assignments, cwe finds
the most common words of a list, fwe the most frequent made-up words, qa answers questions about a paragraph
among others. Prompts fill --lengths tokens of the model's tokenizer, together with the answer, and are never
cut: a length that the model or a task does not support is an error. Prints the mean score of each task and
length in percent: the share of the expected answers that the generated text contains.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import Device, argument, device, option, parse_lengths, refuse
from polyformer.core.errors import unknown
from polyformer.core.ranges import COUNT, NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.probing import ProbedModel, ProbeResult

EXAMPLES = """examples:
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


def run(options: ProbeOptions) -> None:
    """Print the table, and write the JSON file."""
    from polyformer.applications.probing import ProbeConfig, PromptFormat, probe, read_text, score_table
    from polyformer.cli.commands.prompt import unescaped
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
