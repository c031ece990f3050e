"""A checkpoint that generates text, by its generation settings, overridden by the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from polyformer.core.errors import InputError, unknown
from polyformer.models.architectures import Transformer
from polyformer.models.generation import BeamConfig, GenerationConfig
from polyformer.models.generation.hub_format import from_hub
from polyformer.training.recipes.reader import Reader
from polyformer.training.tasks.lm import Continuation
from polyformer.training.tasks.text import batched
from polyformer.training.tasks.translate import EXTRA_TOKENS

LENGTHS = "max_length", "max_new_tokens"


class Writer(Reader, Continuation):
    """A reader for generation. `rules`: generation settings as on the hub; `prefix`: starts every text.

    Old checkpoints have these settings in config.json.
    """

    def __init__(self, folder: Path, wanted: str, device: torch.device):
        super().__init__(folder, wanted, device)
        described = {**self.fields, "architectures": None}  # marks it as the content of a config.json
        self.rules: dict[str, Any] = dict(self.model.generation or described)
        self.prefix = ""

    def follow(self, **options: Any) -> None:
        """Override the generation settings of the checkpoint by `options`."""
        if options.get("do_sample"):
            self.rules |= {"num_beams": 1, "top_k": self.rules.get("top_k", 0)}
        elif options.get("num_beams", 1) > 1:
            self.rules["do_sample"] = False
        elif options.get("penalty_alpha"):
            self.rules |= {"do_sample": False, "num_beams": 1}
        self.rules |= options

    def settings(self, most: int) -> GenerationConfig:
        """Return the generation settings, with at most `most` new tokens by default."""
        limited = any(self.rules.get(name) is not None for name in LENGTHS)
        return from_hub(self.rules if limited else {**self.rules, "max_new_tokens": most})

    def start(self, prompt: str) -> list[int]:
        """Return the token ids of a text that starts with `prompt`, to be continued."""
        return self.checked(prompt, self.tokenizer.encode_prompt(prompt))

    def drawing(self) -> torch.Generator | None:
        """Return a generator for sampling, or None if the settings do not sample.

        The default generator of torch starts with the same seed in every process.
        """
        if self.settings(EXTRA_TOKENS).method != "sample":
            return None
        generator = torch.Generator(next(self.model.parameters()).device)
        generator.seed()
        return generator

    def between(self, source: str | None, target: str | None) -> None:
        """Set the languages of a translation: tokens of the tokenizer, or a task in config.json."""
        known, tasks = self.tokenizer.languages, self.fields.get("task_specific_params") or {}
        task = tasks.get(f"translation_{source}_to_{target}")
        if known:
            for name, language in (("source", source), ("target", target)):
                if language is not None and language not in known:
                    raise unknown(f"--{name}-language", language, known)
            if target is not None:
                self.rules["forced_bos_token_id"] = known[target]
            elif self.rules.get("forced_bos_token_id") is None:
                raise InputError(
                    "--target-language: this model writes many languages; expected one of them, "
                    "such as " + ", ".join(list(known)[:8])
                )
            self.language = source
        elif task is not None:
            self.rules |= task
            self.prefix = self.rules.pop("prefix", "")
        elif source or target:
            names = [name.removeprefix("translation_") for name in tasks if name.startswith("translation_")]
            way = f"expected one of {', '.join(names)}" if names else "leave them out"
            raise InputError(f"--source-language, --target-language: {self.folder} knows none such; {way}")

    def translate(
        self, model: Transformer, texts: Sequence[str], beam: BeamConfig | None = None
    ) -> list[str]:
        """Return the generated text for each text.

        Without a limit in the checkpoint, the output has at most `EXTRA_TOKENS` tokens more than the longest
        text of a batch.
        """
        if beam is not None:
            self.follow(num_beams=beam.num_beams)
        rows, continuations = self.encode([self.prefix + text for text in texts]), [""] * len(texts)
        generator = self.drawing()
        most = self.batch_tokens // self.settings(EXTRA_TOKENS).beam.num_beams
        for chosen, batch in batched(model, rows, self.collate, most):
            config = self.settings(batch["input_ids"].shape[1] + EXTRA_TOKENS)
            generated = model.generate(
                batch["input_ids"],
                batch["attention_mask"],
                config,
                None,
                self.tokenizer.decode,
                generator=generator,
            )
            several = generated.texts(self.tokenizer.decode, config.stop)
            for i, text in zip(chosen, several[:: config.num_return_sequences]):
                continuations[i] = text.strip()
        return continuations
