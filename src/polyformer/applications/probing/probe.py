"""Probe a model: generate an answer to every prompt, and score it exactly."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from polyformer.applications.probing.catalogue import ProbeText, find_task
from polyformer.applications.probing.filling import Prompt, PromptFormat, fill
from polyformer.applications.probing.models import ProbedModel
from polyformer.core.errors import InputError


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
