"""Models that generate text: translations, summaries and continuations."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from polyformer.applications.chat.conversation import (
    Conversation,
    conversations_of,
    ending_turns,
    template_of,
)
from polyformer.applications.loaded.base import LoadedModel, texts_of
from polyformer.core.errors import InputError
from polyformer.data import by_tokens
from polyformer.models.generation import BeamConfig, GenerationConfig
from polyformer.models.generation.config import with_settings
from polyformer.models.generation.hub_format import SUPPORTED_FIELDS
from polyformer.training.recipes.reader import LENGTHS, Writer

SAMPLING = "temperature", "top_k", "top_p", "seed"
"""Settings that turn sampling on."""

NEW_TOKENS, REPLY_TOKENS = 64, 512
"""The most new tokens of a text and of a reply, without another limit in the checkpoint."""


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

    @property
    def abilities(self) -> tuple[str, ...]:
        """Return `generate`, and `chat` for a model with a chat template."""
        return ("generate", "chat") if self.task.tokenizer.chat is not None else ("generate",)

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

    def chat(
        self, messages: Any, max_new_tokens: int | None = None, stop: str | None = None, **settings: Any
    ) -> Any:
        """Return the reply to a conversation, or a list of replies; see `LoadedModel.chat`."""
        tokenizer, tools = self.task.tokenizer, settings.pop("tools", None)
        chat = template_of(tokenizer, self.path)
        chats, single = conversations_of(messages)
        config = self.reply_settings(settings, max_new_tokens, stop)
        texts = [chat.render(turns, tools=tools, add_generation_prompt=True) for turns in chats]
        rows = [tokenizer.encode_chat(text)[0] for text in texts]
        with self._inference():
            replies = self._texts(rows, config)
        results = [several[0] if config.num_return_sequences == 1 else several for several in replies]
        return results[0] if single else results

    def conversation(
        self,
        system: str | None = None,
        max_new_tokens: int | None = None,
        stop: str | None = None,
        **settings: Any,
    ) -> Conversation:
        """Return a conversation that computes each turn only once; arguments as in `chat`."""
        tools = settings.pop("tools", None)
        template_of(self.task.tokenizer, self.path)
        config = self.reply_settings(settings, max_new_tokens, stop)
        return Conversation(self.model, self.task.tokenizer, config, system, {"tools": tools})

    def reply_settings(
        self, settings: dict[str, Any], max_new_tokens: int | None = None, stop: str | None = None
    ) -> GenerationConfig:
        """Return the configuration of replies: the same as `settings`, and they end with the turn."""
        if max_new_tokens is not None:
            settings = {**settings, "max_new_tokens": max_new_tokens}
        config = self.settings(settings, stop, REPLY_TOKENS)
        tokenizer = self.task.tokenizer
        own = self.model.config.special.eos
        return ending_turns(config, template_of(tokenizer, self.path), tokenizer, own)

    def settings(
        self, settings: dict[str, Any], stop: str | None = None, most: int = NEW_TOKENS
    ) -> GenerationConfig:
        """Return the configuration of these generation settings, with the defaults of the checkpoint.

        most: the most new tokens by default. Raises `InputError` for an unknown setting.
        """
        named = with_sampling(settings)
        limited = any(named.get(name) is not None for name in LENGTHS)
        config = plain_settings(named if limited else {**named, "max_new_tokens": most}, stop)
        if not isinstance(self.task, Writer):
            return config
        task = copy.copy(self.task)
        task.rules = dict(self.task.rules)
        # The rules of a checkpoint have transformers' names; `seed` and `cache` are not among them.
        own = {name: named.pop(name) for name in [*named] if name not in SUPPORTED_FIELDS}
        task.follow(**named, **({"stop_strings": (stop,)} if stop else {}))
        return with_settings(task.settings(most), own)

    def _continued(self, prompts: Sequence[str], config: GenerationConfig) -> list[Any]:
        """Return the prompts with their new texts."""
        rows = [self.task.start(prompt) for prompt in prompts]
        shown = [shown_prompt(prompt, self.task.tokenizer.decode(ids)) for prompt, ids in zip(prompts, rows)]
        results = [[start + text for text in texts] for start, texts in zip(shown, self._texts(rows, config))]
        return [several[0] if config.num_return_sequences == 1 else several for several in results]

    def _texts(self, rows: Sequence[list[int]], config: GenerationConfig) -> list[list[str]]:
        """Return the new texts after each row of tokens, in batches of rows of similar length.

        A seed draws the same numbers for each row, as in separate calls.
        """
        decode, count = self.task.tokenizer.decode, config.num_return_sequences
        alone = config.method == "sample" and config.sampling.seed is not None
        results: list[list[str]] = [[] for _ in rows]
        for numbers in [[number] for number in range(len(rows))] if alone else self._batches(rows, config):
            ids, mask = self._padded([rows[number] for number in numbers])
            texts = self.model.generate(ids, mask, config, None, decode).texts(decode, config.stop)
            for place, number in enumerate(numbers):
                results[number] = texts[place * count : (place + 1) * count]
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
