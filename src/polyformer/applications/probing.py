"""Probes of long texts: does a model still find information at a length, not only a low perplexity?

    model = ProbedModel.of(model, tokenizer)
    results = probe(model, ["niah_single_2", "vt"], [1024, 4096], read_text(None), ProbeConfig(samples=50))

The tasks are RULER's (Hsieh et al. 2024), generated from a seed, and have its names. A prompt has a wanted
number of tokens of the model's tokenizer: the sample with the most units that fits.

    tokens of the prompt + tokens of the answer <= length

Nothing is cut off: a sample that is too long has fewer units, and if the smallest sample is too long, the
length is refused. Answers are scored by the texts that they contain.

A `ProbedModel` is a decoder of this library or a causal model of transformers.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch

from polyformer.applications.probe_tasks import (
    CommonWords,
    DistractedQuestions,
    FrequentWords,
    Needles,
    ProbeTask,
    Sample,
    VariableTracking,
    match_all,
    match_any,
)
from polyformer.applications.prompting import write_answers
from polyformer.core.errors import InputError, quote, unknown
from polyformer.data import Tokenizer
from polyformer.data.formats.guess import begins_as_squad
from polyformer.data.sources.origins import open_source, source_name
from polyformer.data.sources.splits import are_answers
from polyformer.models.architectures import Transformer
from polyformer.models.config import max_positions
from polyformer.models.generation import ContinuedText

__all__ = [
    "TASKS",
    "ProbeAnswer",
    "ProbeConfig",
    "ProbeResult",
    "ProbeTask",
    "ProbeText",
    "ProbedModel",
    "Prompt",
    "PromptFormat",
    "Sample",
    "fill",
    "find_task",
    "match_all",
    "match_any",
    "probe",
    "prompts",
    "read_text",
    "score_table",
    "task_names",
]

WORDS = 2**20
"""The most words of a text that are used."""


@dataclass(frozen=True)
class ProbeText:
    """The text around needles, as `words`, and the questions about its `paragraphs`, if there are any."""

    words: Sequence[str]
    rows: Sequence[dict[str, Any]] = ()
    paragraphs: Sequence[str] = ()


def read_text(path: str | None, format: str | None = None) -> ProbeText:
    """Read the column `text` of a file, or `context`, `question` and `answers` of questions as in SQuAD.

    None is the default text. Raises `InputError` for a file with neither.
    """
    if format is None and path is not None and Path(path).suffix == ".json" and Path(path).is_file():
        format = "squad" if begins_as_squad(Path(path)) else None
    texts: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    for row in open_source(path, "test", format):
        text = row.get("context", row.get("text"))
        if not isinstance(text, str):
            raise InputError(
                f"{source_name(path)}: expected a column 'text', or 'question', 'context' and 'answers' as "
                f"in SQuAD, got {', '.join(map(repr, row)) or 'none'}"
            )
        texts[text] = None
        answers = row.get("answers")
        if (
            isinstance(answers, dict)
            and are_answers(answers)
            and answers["text"]
            and isinstance(row.get("question"), str)
        ):
            rows.append(row)
    words = list(islice((word for text in texts for word in text.split()), WORDS))
    if not words:
        raise InputError(f"{source_name(path)}: empty; there is no text in it")
    return ProbeText(words, rows, list(texts) if rows else ())


TASKS: Mapping[str, Callable[[int, ProbeText], ProbeTask]] = {
    "niah_single_1": lambda length, text: Needles("noise"),
    "niah_single_2": lambda length, text: Needles("text", text.words),
    "niah_single_3": lambda length, text: Needles("text", text.words, value_kind="uuids"),
    "niah_multikey_1": lambda length, text: Needles("text", text.words, keys=4),
    "niah_multikey_2": lambda length, text: Needles("needles"),
    "niah_multikey_3": lambda length, text: Needles("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": lambda length, text: Needles("text", text.words, values=4),
    "niah_multiquery": lambda length, text: Needles("text", text.words, keys=4, queries=4),
    "vt": lambda length, text: VariableTracking(),
    "cwe": lambda length, text: CommonWords(*_occurrences(length)),
    "fwe": lambda length, text: FrequentWords(vocabulary=max(10, length // 50)),
    "qa": lambda length, text: DistractedQuestions(text.rows, text.paragraphs),
}
"""By RULER's name: a function from the length of prompts in tokens and the text to the task."""


def _occurrences(length: int) -> tuple[int, int]:
    """Return how often common and other words occur: less often in prompts that are shorter than RULER's."""
    return (30, 3) if length >= 4096 else (6, 1) if length >= 1024 else (4, 1)


def task_names(text: ProbeText) -> list[str]:
    """Return the tasks that are possible with a text: `qa` needs questions."""
    return [name for name in TASKS if name != "qa" or text.rows]


def find_task(name: str, length: int, text: ProbeText) -> ProbeTask:
    """Return the task of a name; raise `InputError` for an unknown name, and for `qa` without questions."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    if name not in task_names(text):
        raise InputError(
            "tasks: 'qa' needs questions about a text; name a file in SQuAD's format with --text"
        )
    return TASKS[name](length, text)


TRIES = 20
"""Questions to try if their smallest prompt is too long, as for questions about long paragraphs."""

Start = Callable[[str], list[int]]
"""A function from a prompt to its token ids, with the special tokens before it."""


@dataclass(frozen=True)
class Prompt:
    """A sample as token ids."""

    sample: Sample
    ids: list[int]


@dataclass(frozen=True)
class PromptFormat:
    """The text of a prompt: `shots` demonstrations, then the sample.

    template: text with `{prompt}`, such as the format of an instruction-tuned model's messages. The beginning
    of the answer follows it.
    """

    template: str = "{prompt}"
    shots: int = 0

    def __post_init__(self) -> None:
        if self.template.count("{prompt}") != 1:
            raise InputError(f"template: expected {{prompt}} once in it, got {quote(self.template)}")

    def text(self, task: ProbeTask, units: int, key: str) -> tuple[str, Sample]:
        """Return the prompt and the sample of the seed `key`."""
        shown = [task.demonstration(random.Random(f"{key}/shot {n}")) for n in range(self.shots)]
        sample = task.sample(units, random.Random(key))
        demonstrations = "".join(f"{shot}\n\n" for shot in shown)
        before, after = self.template.split("{prompt}")
        prefix = sample.prefix.lstrip() if after[-1:].isspace() else sample.prefix
        return f"{before}{demonstrations}{sample.text}{after}{prefix}", sample


def fill(task: ProbeTask, start: Start, length: int, format: PromptFormat, key: str) -> Prompt:
    """Return the longest prompt of the seed `key` with which the answer also fits in `length` tokens.

    Raises `InputError` if the smallest prompt is longer.
    """
    room, shortest = length - task.new_tokens, None
    for number in range(TRIES):
        prompt = _longest(task, start, room, format, f"{key}/{number}")
        if isinstance(prompt, Prompt):
            return prompt
        shortest = min(prompt, shortest or prompt)
    raise InputError(
        f"the shortest prompt has {shortest} tokens and its answer up to {task.new_tokens}, got a length of "
        f"{length}; use a length of {(shortest or 0) + task.new_tokens} or more"
    )


def _longest(task: ProbeTask, start: Start, room: int, format: PromptFormat, key: str) -> Prompt | int:
    """Return the longest prompt of at most `room` tokens, or the tokens of the shortest prompt."""

    def prompt(units: int) -> Prompt:
        text, sample = format.text(task, units, key)
        return Prompt(sample, start(text))

    units, best = task.fewest, prompt(task.fewest)
    if len(best.ids) > room:
        return len(best.ids)
    most = room if task.most is None else task.most  # a unit has a token or more
    # Double the units until the prompt is too long, then bisect. More units have more tokens, except for a
    # few tokens, because words may differ; the result fits in any case.
    high, step = most + 1, 1
    while high - units > 1:
        middle = min(units + step, (units + high) // 2)
        longer = prompt(middle)
        if len(longer.ids) <= room:
            units, best, step = middle, longer, 2 * step
        else:
            high = middle
    return best


Continue = Callable[[Sequence[list[int]], int], list[str]]
"""A function from prompts (token ids) and the largest number of new tokens to the generated texts."""


@dataclass(frozen=True)
class ProbedModel:
    """A model that continues prompts greedily, and the most tokens that it reads; None for no limit."""

    start: Start
    continue_: Continue
    longest: int | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Tokenizer,
        start: Start | None = None,
        batch_tokens: int = 4096,
        cache: str | None = None,
    ) -> Self:
        """Return the prober's view of a decoder, or of a model of transformers, attached or not.

        start: by default the tokenizer's ids for a text that is continued. batch_tokens: tokens that a
        decoder reads at once, at least one prompt. cache: the cache policy of a decoder of this library.
        """
        start = tokenizer.encode_prompt if start is None else start
        if isinstance(model, Transformer):
            if model.encoder is not None or not model.head.predicts_next:
                raise InputError("model: expected a decoder alone that predicts the next token")

            def write(prompts: Sequence[list[int]], most: int) -> list[str]:
                sizes = {"max_new_tokens": most, "batch_tokens": batch_tokens}
                return write_answers(model, prompts, tokenizer.decode, stop="", cache=cache, **sizes)

            return cls(start, write, max_positions(model.config))
        return cls(start, _by_transformers(model, tokenizer), _longest_prompt(model.config))

    def check_length(self, length: int) -> None:
        """Raise `InputError` if the model would have to read a cut prompt."""
        if self.longest is not None and length > self.longest:
            raise InputError(
                f"lengths: expected at most {self.longest} tokens, which the model takes, got {length}; use "
                f"shorter lengths, or make a model for more by polyformer convert MODEL OUT --max-positions "
                f"{length}"
            )


def _by_transformers(model: Any, tokenizer: Tokenizer) -> Continue:
    def write(prompts: Sequence[list[int]], most: int) -> list[str]:
        texts = []
        pad = model.generation_config.pad_token_id
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            options = {"max_new_tokens": most, "do_sample": False, "num_beams": 1}
            with torch.no_grad():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), pad_token_id=pad or 0, **options
                )
            texts.append(ContinuedText(tokenizer.decode, prompt)(out[0, len(prompt) :].tolist()))
        return texts

    return write


def _longest_prompt(config: Any) -> int | None:
    """Return the most tokens of a model of transformers; None for rotary positions, which have no table."""
    config = config.get_text_config()
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None):
        return None
    return getattr(config, "max_position_embeddings", None)


@dataclass(frozen=True)
class ProbeAnswer:
    """The generated text for a prompt of `tokens` tokens, and its score from 0 to 1."""

    tokens: int
    depth: float | None
    answers: tuple[str, ...]
    text: str
    score: float


@dataclass(frozen=True)
class ProbeResult:
    """The answers of a task at one length."""

    task: str
    length: int
    answers: tuple[ProbeAnswer, ...]

    @property
    def score(self) -> float:
        """Return the mean score, from 0 to 1."""
        return math.fsum(answer.score for answer in self.answers) / len(self.answers)

    @property
    def standard_error(self) -> float:
        """Return the standard error of the mean score; nan for a single sample."""
        count, mean = len(self.answers), self.score
        squares = math.fsum((answer.score - mean) ** 2 for answer in self.answers)
        return math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        error = self.standard_error
        return {
            "task": self.task,
            "length": self.length,
            "score": self.score,
            "standard_error": None if math.isnan(error) else error,
            "answers": [asdict(answer) for answer in self.answers],
        }


@dataclass(frozen=True)
class ProbeConfig:
    """Options of a probe.

    samples: prompts per task and length. More samples extend the same prompts. format: of the prompts.
    max_new_tokens: the largest number of tokens of an answer, if smaller than the task's.
    """

    samples: int = 20
    seed: int = 0
    format: PromptFormat = PromptFormat()
    max_new_tokens: int | None = None


def prompts(name: str, length: int, model: ProbedModel, text: ProbeText, config: ProbeConfig) -> list[Prompt]:
    """Return the prompts of a task at one length; raise `InputError` for a length that is too short."""
    task = find_task(name, length, text)
    keys = [f"{config.seed}/{name}/{length}/{number}" for number in range(config.samples)]
    try:
        return [fill(task, model.start, length, config.format, key) for key in keys]
    except InputError as error:
        raise InputError(f"lengths: {name}: {error}") from error


def probe(
    model: ProbedModel,
    names: Sequence[str],
    lengths: Sequence[int],
    text: ProbeText,
    config: ProbeConfig,
    show: Callable[[ProbeResult], None] = lambda result: None,
) -> list[ProbeResult]:
    """Return the results of the tasks at each length; `show` receives each as soon as it is known.

    Raises `InputError` before anything is generated if a prompt does not fit: no prompt is ever cut.
    """
    model.check_length(max(lengths))
    cases = [(name, length) for length in lengths for name in names]
    drawn = [prompts(name, length, model, text, config) for name, length in cases]
    results = []
    for (name, length), filled in zip(cases, drawn):
        task = find_task(name, length, text)
        most = min(task.new_tokens, config.max_new_tokens or task.new_tokens)
        texts = model.continue_([prompt.ids for prompt in filled], most)
        answers = tuple(
            ProbeAnswer(
                len(prompt.ids),
                prompt.sample.depth,
                prompt.sample.answers,
                answer,
                task.score(answer, prompt.sample.answers),
            )
            for prompt, answer in zip(filled, texts, strict=True)
        )
        results.append(ProbeResult(name, length, answers))
        show(results[-1])
    return results


def score_table(results: Sequence[ProbeResult]) -> str:
    """Return a table of scores in percent: a row per task, a column per length, and the means."""
    names = list(dict.fromkeys(result.task for result in results))
    lengths = list(dict.fromkeys(result.length for result in results))
    scores = {(result.task, result.length): 100 * result.score for result in results}
    width = max(len(name) for name in [*names, "tokens", "mean"])
    lines = [f"{'tokens':<{width}}" + "".join(f"  {length:>7,}" for length in lengths)]
    rows = {name: [scores[name, length] for length in lengths] for name in names}
    if len(names) > 1:
        rows["mean"] = [math.fsum(column) / len(names) for column in zip(*rows.values())]
    lines += [f"{name:<{width}}" + "".join(f"  {score:7.1f}" for score in row) for name, row in rows.items()]
    return "\n".join(lines)
