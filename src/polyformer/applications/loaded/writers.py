"""Models that generate text: translations, summaries and continuations."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from polyformer.applications.loaded.base import LoadedModel, texts_of
from polyformer.core.errors import InputError
from polyformer.data import by_tokens
from polyformer.models.generation import BeamConfig, GenerationConfig
from polyformer.models.generation.config import with_settings
from polyformer.training.recipes.reader import Writer

SAMPLING = "temperature", "top_k", "top_p", "seed"
"""Settings that turn sampling on."""

NEW_TOKENS = 64


class TargetWriter(LoadedModel):
    """An encoder-decoder that generates a text for each text: a translation, a summary, or both."""

    command: ClassVar[str] = "translate"
    does: ClassVar[str] = "translate"

    @property
    def abilities(self) -> tuple[str, ...]:
        """Return the method with the name of the task, or both for models of several tasks."""
        kind = "" if isinstance(self.task, Writer) else self.task.config.kind
        return (kind,) if kind in ("translate", "summarize") else ("translate", "summarize")

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """Return the generated text of each text, with the arguments of `translate`."""
        return self._written(*inputs, **options)

    def translate(
        self,
        texts: Any,
        num_beams: int | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> Any:
        self._check("translate")
        return self._written(texts, num_beams, source_language, target_language)

    def summarize(self, texts: Any, num_beams: int | None = None) -> Any:
        self._check("summarize")
        return self._written(texts, num_beams)

    def _check(self, name: str) -> None:
        if name not in self.abilities:
            raise self.cannot(name)

    def _written(
        self,
        texts: Any,
        num_beams: int | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> Any:
        task = self._between(source_language, target_language)
        beam = None if num_beams is None else BeamConfig(num_beams=num_beams)
        return self._each(texts, lambda items: task.translate(self.model, texts_of("texts", items), beam))

    def _between(self, source: str | None, target: str | None) -> Any:
        """Return the task for these languages; the settings of a call must not change the next."""
        if isinstance(self.task, Writer):
            task = copy.copy(self.task)
            task.rules = dict(self.task.rules)
            task.between(source, target)
            return task
        if source or target:
            raise InputError(
                f"{self.path}: a run has no language codes; leave out --source-language and --target-language"
            )
        return self.task


class Extractor(LoadedModel):
    """A model that summarizes a text by some of its sentences."""

    command: ClassVar[str] = "translate"
    does: ClassVar[str] = "summarize"

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """Return the summary of each text."""
        if any(value is not None for value in options.values()):
            raise InputError(
                f"{self.path}: sentences are chosen, not generated; leave out --num-beams, --source-language "
                "and --target-language"
            )
        return self.summarize(*inputs)

    def summarize(self, texts: Any, num_beams: int | None = None) -> Any:
        """Return the summary of each text: its best sentences, in the order of the text."""
        if num_beams is not None:
            return self.predict(texts, num_beams=num_beams)
        return self._each(texts, lambda items: self.task.extract(self.model, texts_of("texts", items)))


class Continuer(LoadedModel):
    """A language model that continues texts."""

    command: ClassVar[str] = "generate"
    does: ClassVar[str] = "generate"

    def generate(
        self, prompts: Any = "", max_new_tokens: int | None = None, stop: str | None = None, **settings: Any
    ) -> Any:
        """Return each prompt with its continuation, as `polyformer generate` prints it.

        A setting `num_return_sequences` above 1 returns a list of texts for each prompt. The other arguments
        are those of `LoadedModel.generate`.
        """
        if max_new_tokens is not None:
            settings["max_new_tokens"] = max_new_tokens
        config = self.settings(settings, stop)
        return self._each(prompts, lambda items: self._continued(texts_of("prompts", items), config))

    def settings(self, settings: dict[str, Any], stop: str | None = None) -> GenerationConfig:
        """Return the configuration of these generation settings, with the defaults of the checkpoint.

        Raises `InputError` for an unknown setting.
        """
        named = with_sampling(settings)
        config = plain_settings(named, stop)
        if not isinstance(self.task, Writer):
            return config
        seed, task = named.pop("seed", None), copy.copy(self.task)
        task.rules = dict(self.task.rules)
        task.follow(**named, **({"stop_strings": (stop,)} if stop else {}))
        config = task.settings(NEW_TOKENS)
        return config if seed is None else replace(config, sampling=replace(config.sampling, seed=seed))

    def _continued(self, prompts: Sequence[str], config: GenerationConfig) -> list[Any]:
        """Return the texts in batches of prompts of similar length.

        A seed draws the same numbers for each prompt, as in a call of its own.
        """
        decode, count = self.task.tokenizer.decode, config.num_return_sequences
        rows = [self.task.start(prompt) for prompt in prompts]
        shown = [shown_prompt(prompt, decode(ids)) for prompt, ids in zip(prompts, rows)]
        alone = config.method == "sample" and config.sampling.seed is not None
        results: list[Any] = [""] * len(prompts)
        for numbers in [[number] for number in range(len(rows))] if alone else self._batches(rows, config):
            ids, mask = self._padded([rows[number] for number in numbers])
            texts = self.model.generate(ids, mask, config, None, decode).texts(decode, config.stop)
            for place, number in enumerate(numbers):
                several = [shown[number] + text for text in texts[place * count : (place + 1) * count]]
                results[number] = several[0] if count == 1 else several
        return results

    def _batches(self, rows: Sequence[list[int]], config: GenerationConfig) -> list[list[int]]:
        """Return the numbers of the rows of each batch, by length."""
        beams = config.beam.num_beams * config.num_return_sequences
        lengths = torch.tensor([[len(ids) + config.lengths(len(ids))[1]] for ids in rows]).numpy()
        limit = max(self.task.batch_tokens // beams, int(lengths.max(initial=1)))
        return [numbers.tolist() for numbers in by_tokens(lengths, None, max_tokens=limit)]

    def _padded(self, rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return prompts padded on the left, and their mask; None without padding."""
        device, width = next(self.model.parameters()).device, max(map(len, rows))
        pad = self.model.config.special.pad or 0
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        if all(len(row) == width for row in rows):
            return ids, None
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        return ids, mask


def with_sampling(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with sampling on if one of its settings is present, and the default of contrast."""
    contrastive = settings.get("penalty_alpha") is not None
    named = {"top_k": 4, **settings} if contrastive else dict(settings)
    if any(name in named for name in SAMPLING if name != "top_k" or not contrastive):
        named.setdefault("do_sample", True)
    return named


def plain_settings(settings: Mapping[str, Any], stop: str | None = None) -> GenerationConfig:
    """Return the configuration of settings with the defaults of polyformer."""
    return with_settings(GenerationConfig(stop=() if stop is None else (stop,)), settings)


def shown_prompt(prompt: str, decoded: str) -> str:
    """Return a prompt without the white space at its end if its tokens, `decoded`, do not have it.

    The continuation of such tokens begins with a space of its own.
    """
    end = prompt[len(prompt.rstrip()) :]
    return prompt if decoded.endswith(end) else prompt.rstrip()
