"""The models that can be probed: decoders of this library, and causal models of transformers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from polyformer.applications.probing.filling import Start
from polyformer.applications.prompting import write_answers
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer
from polyformer.models.architectures import Transformer
from polyformer.models.config import max_positions
from polyformer.models.generation import ContinuedText

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
        return cls(start, _by_transformers(model, tokenizer), _longest(model.config))

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


def _longest(config: Any) -> int | None:
    """Return the most tokens of a model of transformers; None for rotary positions, which have no table."""
    config = config.get_text_config()
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None):
        return None
    return getattr(config, "max_position_embeddings", None)
