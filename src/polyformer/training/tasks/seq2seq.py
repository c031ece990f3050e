"""Shared parts of sequence-to-sequence tasks: generation of a target text from a source text.

The encoder reads source <eos>; the decoder generates target <eos>, starting from <bos>, or from <pad> if the
tokenizer has none (T5). Batches contain pairs of similar length, by token count.
"""

import abc
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from polyformer.data import Tokenizer
from polyformer.data.rows.batching import Row
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.generation import BeamConfig, GenerationConfig
from polyformer.nn.heads import HeadConfig, LanguageModelConfig
from polyformer.training.tasks.base import Workers
from polyformer.training.tasks.text import TextTask, TextTaskConfig, required, starting_from_pad


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceToSequenceConfig(TextTaskConfig):
    """Options of sequence-to-sequence tasks."""

    max_length: int = 256  # tokens of the longer side of a training pair, including <eos>
    beam: BeamConfig = BeamConfig(num_beams=4)

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    text_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    length_option: ClassVar[str] = "max_length"


class SequenceToSequence(TextTask):
    """A sequence-to-sequence task, with metrics: loss (nats per target token) and perplexity."""

    config: Any
    command = "translate"
    stacks = "encoder-decoder"
    head: HeadConfig = LanguageModelConfig(label_smoothing=0.1)

    def __init__(self, config: SequenceToSequenceConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.eos = required(tokenizer.eos_id, "<eos>")

    def adapt(self, config: Any) -> ModelConfig:
        """Return the config as for other text tasks; the decoder starts from <pad> if there is no <bos>."""
        return starting_from_pad(super().adapt(config))

    @abc.abstractmethod
    def max_generated(self, width: int) -> int:
        """Return the maximum number of generated tokens for sources of at most `width` tokens."""

    def generation_settings(self) -> dict[str, Any]:
        """Return the settings of `translate` as in generation_config.json, for an exported model.

        The format lacks the normalization "gnmt" of beams: transformers divides by a power of the length.
        """
        settings: dict[str, Any] = {"max_new_tokens": self.max_generated(self.config.max_length)}
        beam: BeamConfig = self.config.beam
        if beam.num_beams > 1:
            names = "num_beams", "length_penalty", "early_stopping"
            settings |= {name: getattr(beam, name) for name in names}
        return settings

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text and <eos>."""
        return [[*ids, self.eos] for ids in self.tokenizer.encode_batch(texts)]

    def source_rows(self, texts: Sequence[str]) -> list[Row]:
        """Return all inputs of the encoder for each text."""
        return [{"input_ids": ids} for ids in self.encode(texts)]

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the decoder target of each text."""
        return self.encode(texts)

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Return pairs of token ids."""
        sources = self.source_rows([row["source"] for row in rows])
        targets = self.encode_targets([row["target"] for row in rows])
        return [{**source, "labels": target} for source, target in zip(sources, targets)]

    def translated(self, model: Transformer, texts: Sequence[str], workers: Workers) -> list[str]:
        """Return `translate` of all texts, computed in shares by the processes."""
        return workers.each(partial(self.translate, model), texts)

    def translate(
        self, model: Transformer, texts: Sequence[str], beam: BeamConfig | None = None
    ) -> list[str]:
        """Return the generated text for each text, by beam search, in batches of texts of similar length."""
        search: BeamConfig = beam or self.config.beam
        sources = self.source_rows(texts)
        outputs = [""] * len(texts)
        for numbers, batch in self.batched(model, sources, self.batch_tokens // search.num_beams):
            ids, mask, others = batch.pop("input_ids"), batch.pop("attention_mask"), dict[str, Any](batch)
            config = GenerationConfig(max_new_tokens=self.max_generated(ids.shape[1]), beam=search)
            generated = model.generate(ids, mask, config, **others)
            for number, text in zip(numbers, generated.texts(self.tokenizer.decode)):
                outputs[number] = text.strip()
        return outputs


class TruncatingSequenceToSequence(SequenceToSequence):
    """A task that truncates sources to `max_length` tokens, and targets to those of `target_option`."""

    target_option: ClassVar[str] = "max_target"

    def max_generated(self, width: int) -> int:
        """Return the maximum length of a target."""
        return getattr(self.config, self.target_option)

    def source_rows(self, texts: Sequence[str]) -> list[Row]:
        """Return the first `max_length` tokens of each text, including a final <eos>."""
        limit = self.config.max_length - 1
        return [{"input_ids": [*ids[:limit], self.eos]} for ids in self.tokenizer.encode_batch(texts)]

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each target; a longer target is truncated, without <eos>."""
        return [ids[: self.max_generated(0)] for ids in super().encode_targets(texts)]
