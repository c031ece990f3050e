"""Translation: write the target of a source; measured by BLEU on plain text.

The encoder reads source <eos>; the decoder writes target <eos>, starting from <bos>. Batches hold pairs of
similar length, by token count. Vaswani et al. 2017, sections 5.1 and 6.1.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from torch import nn

from polyformer.core.errors import quote
from polyformer.data import Tokenizer
from polyformer.data.batching import Row
from polyformer.generation import BeamConfig, GenerationConfig
from polyformer.heads import HeadConfig, LanguageModelConfig
from polyformer.model import Transformer
from polyformer.tasks.base import Rows
from polyformer.tasks.text import TextTask, TextTaskConfig, required, too_long

ROOM = 50  # a translation may have so many tokens more than its source (Vaswani et al. 2017, section 6.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationConfig(TextTaskConfig):
    """Write the target of a source."""

    max_length: int = 256  # tokens of a training pair's longer side, <eos> included
    too_long: Literal["refuse", "drop"] = "refuse"  # what is done with a longer training pair
    beam: BeamConfig = BeamConfig(num_beams=4)

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    text_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    length_option: ClassVar[str] = "max_length"
    kind: ClassVar[str] = "translate"
    paper: ClassVar[str] = "Vaswani et al. 2017"

    def build(self, tokenizer: Tokenizer) -> "Translation":
        """The task with `tokenizer`."""
        return Translation(self, tokenizer)


class Translation(TextTask):
    """Metrics: loss (nats a target token) and perplexity; `finish` adds bleu, sacrebleu's BLEU of beam search
    on plain text (0 to 100, its default tokenization).
    """

    config: TranslationConfig
    stacks = "encoder-decoder"
    head: HeadConfig = LanguageModelConfig(label_smoothing=0.1)

    def __init__(self, config: TranslationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.eos = required(tokenizer.eos_id, "<eos>")
        required(tokenizer.bos_id, "<bos>")

    @property
    def positions(self) -> int:
        """Of the longest target that beam search may write: `max_length` + `ROOM`."""
        return self.config.max_length + ROOM

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Pairs of at most `max_length` tokens a side; longer ones are dropped, or refused."""
        prepared = self.prepare_held_out(rows)
        lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in prepared]
        limit = self.config.max_length
        longest = int(np.argmax(lengths)) if lengths else 0
        if lengths and lengths[longest] > limit and self.config.too_long == "refuse":
            name = f"pair {longest + 1} ({quote(rows[longest]['source'])})"
            raise too_long(name, lengths[longest], limit, "drop")
        return [row for row, length in zip(prepared, lengths) if length <= limit]

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Pairs of any length."""
        sources = self.tokenizer.encode_batch([row["source"] for row in rows])
        targets = self.tokenizer.encode_batch([row["target"] for row in rows])
        return [
            {"input_ids": [*source, self.eos], "labels": [*target, self.eos]}
            for source, target in zip(sources, targets)
        ]

    def finish(self, model: nn.Module, rows: Rows) -> dict[str, float]:
        """bleu of the translations of `rows`."""
        import sacrebleu

        assert isinstance(model, Transformer)
        pairs = list(rows)
        translations = self.translate(model, [pair["source"] for pair in pairs])
        return {"bleu": sacrebleu.corpus_bleu(translations, [[pair["target"] for pair in pairs]]).score}

    def translate(
        self, model: Transformer, texts: Sequence[str], beam: BeamConfig | None = None
    ) -> list[str]:
        """The translation of each text, by beam search.

        Texts are translated in batches; each may be `ROOM` tokens longer than its batch's longest source.
        """
        beam = beam or self.config.beam
        sources = [[*ids, self.eos] for ids in self.tokenizer.encode_batch(texts)]
        translations = [""] * len(texts)
        for numbers, batch in self.batched(model, sources, self.batch_tokens // beam.num_beams):
            config = GenerationConfig(max_new_tokens=batch["input_ids"].shape[1] + ROOM, beam=beam)
            output = model.generate(batch["input_ids"], batch["attention_mask"], config)
            for number, text in zip(numbers, output.texts(self.tokenizer.decode)):
                translations[number] = text.strip()
        return translations
