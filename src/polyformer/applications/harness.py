"""lm-eval's tasks on language models of this library, through the harness's interface of models (`LM`).

A request for a log-likelihood is scored as in `prompting`; a generation runs `generate`, with a cache policy
if there is one. Texts longer than the model reads keep their end, as in the harness's own models. Gao et al.
2024, Language Model Evaluation Harness.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from polyformer.applications.prompting import Continuation, generate_texts, score_continuations
from polyformer.core.errors import InputError, quote
from polyformer.core.imports import needs_extra
from polyformer.models.architectures import Transformer
from polyformer.models.config import max_positions
from polyformer.models.generation import GenerationConfig
from polyformer.models.generation.config import SamplingConfig

LONGEST = 2048
"""Tokens of a text for models that do not limit them, as in the harness."""

Request = tuple[tuple[str, str], list[int], list[int]]
"""The texts of a context and its continuation, and the ids of both."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarnessSettings:
    """How the harness runs.

    folder: of task files besides the installed ones. shots: demonstrations; None for each task's own number.
    limit: questions of a task. cache: a policy of generations. max_length: tokens of a text. batch_tokens:
    tokens of a batch, padding included. chat: whether prompts are messages of the model's chat template.
    """

    folder: str | None = None
    shots: int | None = None
    limit: int | None = None
    cache: str | None = None
    max_length: int | None = None
    batch_tokens: int = 4096


def evaluate_tasks(
    task: Any, model: Transformer, names: Sequence[str], settings: HarnessSettings = HarnessSettings()
) -> dict[str, Any]:
    """Return the harness's results for the tasks called `names`: metrics with their standard errors.

    task: of a language model, with its tokenizer. Raises `InputError` for a task that the harness does not
    know, or cannot read the data of.
    """
    with needs_extra("harness", "tasks: lm-eval is not installed"):
        import lm_eval
        from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=settings.folder)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        where = "" if settings.folder is None else f" and none is in {settings.folder}"
        raise InputError(
            f"tasks: the harness has no task {quote(unknown[0])}{where}; lm_eval ls tasks prints all"
        )
    try:
        evaluate: Any = lm_eval.simple_evaluate
        results = evaluate(
            model=language_model(task, model, settings),
            tasks=list(names),
            num_fewshot=settings.shots,
            limit=settings.limit,
            task_manager=manager,
            log_samples=False,
            verbosity="ERROR",
        )
    except (OSError, ConnectionError) as error:
        raise InputError(f"tasks: the data of {', '.join(names)} cannot be read: {error}") from error
    assert results is not None, "only the main process of several gets none"
    return dict(results)


def results_table(results: dict[str, Any]) -> str:
    """Return the harness's own table of results."""
    from lm_eval.utils import make_table

    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables)


def language_model(task: Any, model: Transformer, settings: HarnessSettings) -> Any:
    """Return the model as the harness's `LM`."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    reader = TokenReader(task, model, settings)

    class HarnessModel(TemplateLM):
        """The harness's interface; all is computed by `TokenReader`."""

        @property
        def eot_token_id(self) -> int:
            return reader.end

        @property
        def prefix_token_id(self) -> int:
            return reader.begin

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            return reader.encode(string, add_special_tokens is not False)

        def _loglikelihood_tokens(
            self, requests: list[Request], disable_tqdm: bool = False, **options: Any
        ) -> list[tuple[float, bool]]:
            return reader.scores([(context, answer) for _, context, answer in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            sums = []
            for request in requests:
                (text,) = request.args
                windows = get_rolling_token_windows(
                    reader.encode(text, False), reader.begin, reader.max_length, 1
                )
                pairs = [make_disjoint_window(window) for window in windows]
                sums.append(math.fsum(score for score, _ in reader.scores(pairs)))
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return reader.generated([request.args for request in requests])

    return HarnessModel()


class TokenReader:
    """Scores and texts of a model for the harness.

    task: of the language model; its `start` returns the ids of a text at the beginning of a document.
    """

    def __init__(self, task: Any, model: Transformer, settings: HarnessSettings):
        self.task, self.model, self.settings = task, model, settings
        limit = max_positions(model.config)
        self.max_length = settings.max_length or (LONGEST if limit is None else min(limit, LONGEST))
        tokenizer = task.tokenizer
        self.end = 0 if tokenizer.eos_id is None else int(tokenizer.eos_id)
        self.begin = self.end if tokenizer.bos_id is None else int(tokenizer.bos_id)

    def encode(self, text: str, starts: bool) -> list[int]:
        """Return the ids of a text, with those that begin a document if it `starts`."""
        if starts:
            return list(self.task.start(text))
        return list(self.task.tokenizer.encode(text))

    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return log P of the second ids after the first of each pair, and whether each was most probable."""
        rows = []
        for context, answer in pairs:
            ids = (context + answer)[-(self.max_length + 1) :]
            rows.append(Continuation(ids, max(1, len(ids) - len(answer))))
        scores = score_continuations(self.model, rows, self.settings.batch_tokens)
        return [(score.log_p, score.greedy) for score in scores]

    def generated(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Return the text after each prompt, up to its stop texts."""
        texts = [""] * len(requests)
        groups: dict[GenerationConfig, list[int]] = {}
        for number, (_, options) in enumerate(requests):
            groups.setdefault(generation_settings(options, self.settings.cache), []).append(number)
        for config, numbers in groups.items():
            assert config.max_new_tokens is not None
            room = self.max_length - config.max_new_tokens
            if room < 1:
                raise InputError(
                    f"max_length: {config.max_new_tokens} new tokens leave no room for a prompt in "
                    f"{self.max_length}; name a larger length"
                )
            prompts = [self.encode(requests[number][0], True)[-room:] for number in numbers]
            decode, most = self.task.tokenizer.decode, self.settings.batch_tokens
            answers = generate_texts(self.model, prompts, decode, config, most)
            for number, text in zip(numbers, answers, strict=True):
                texts[number] = text
        return texts


KNOWN: dict[str, Callable[[Any], Any]] = {"temperature": float, "top_p": float, "top_k": int}
"""Settings of sampling with the same name and meaning here."""


def generation_settings(options: dict[str, Any], cache: str | None) -> GenerationConfig:
    """Convert a task's `generation_kwargs` to the settings of `generate`."""
    stop = options.get("until") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    config = GenerationConfig(max_new_tokens=int(options.get("max_gen_toks", 256)), stop=stop)
    samples = bool(options.get("do_sample")) and float(options.get("temperature", 1.0)) > 0
    if samples:
        chosen = {name: kind(options[name]) for name, kind in KNOWN.items() if options.get(name) is not None}
        config = dataclasses.replace(config, sampling=SamplingConfig(do_sample=True, **chosen))
    return dataclasses.replace(config, cache=cache)
