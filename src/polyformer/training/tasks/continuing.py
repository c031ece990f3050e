"""The parts that tasks of decoders share: texts that are continued, and the loss of the next tokens."""

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyformer.core.host_values import IGNORED, next_labels
from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Batch
from polyformer.models.architectures import Transformer
from polyformer.models.generation import Generated, GenerationConfig
from polyformer.training.tasks.base import ModelLoss


class Continuation(abc.ABC):
    """Generation of texts that start with a prompt."""

    tokenizer: Tokenizer

    @abc.abstractmethod
    def start(self, prompt: str) -> list[int]:
        """Return the token ids of a text that starts with `prompt`, to be continued."""

    def generate(
        self,
        model: Transformer,
        prompt: str,
        config: GenerationConfig,
        streamer: Callable[[Tensor], None] | None = None,
    ) -> list[str]:
        """Return continuations of `prompt`."""
        generated = self.write(model, prompt, config, streamer)
        return generated.texts(self.tokenizer.decode, config.stop)

    def write(
        self,
        model: Transformer,
        prompt: str,
        config: GenerationConfig,
        streamer: Callable[[Tensor], None] | None = None,
        **more: Any,
    ) -> Generated:
        """Return the same as tokens; `more`: of `polyformer.models.generation.generate`, such as `draft`."""
        ids = torch.tensor([self.start(prompt)], device=next(model.parameters()).device)
        return model.generate(ids, None, config, streamer, self.tokenizer.decode, **more)


class NextTokens(ModelLoss):
    """The loss of a language model, a mean over the tokens with a next token in their document."""

    def weight(self, batch: Batch) -> int:
        """Return the number of tokens with a next token in their document."""
        if "shift_labels" in batch:
            return int((batch["shift_labels"] != IGNORED).sum())
        return int((next_labels(batch["labels"], batch["document_ids"]) != IGNORED).sum())
