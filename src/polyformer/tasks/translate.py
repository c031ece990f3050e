"""Translation: write the target of a source; measured by BLEU on plain text.

The encoder reads source <eos>; the decoder writes target <eos>, starting from <bos>. Batches hold pairs of
like length, by token count. Vaswani et al. 2017, sections 5.1 and 6.1.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.core.errors import quote
from polyformer.data import Tokenizer
from polyformer.data.batching import Batch, Row
from polyformer.generation import BeamConfig, GenerationConfig
from polyformer.heads import HeadConfig, LanguageModelConfig
from polyformer.model import Transformer
from polyformer.tasks.base import Rows, TaskConfig, TextTask, check_room, exp, required, too_long
from polyformer.training.config import at_least

ROOM = 50  # a translation may have so many tokens more than its source (Vaswani et al. 2017, section 6.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationConfig(TaskConfig):
    """Write the target of a source."""

    max_length: int = 256  # tokens of a training pair's longer side, <eos> included
    too_long: Literal["refuse", "drop"] = "refuse"  # what is done with a longer training pair
    beam: BeamConfig = BeamConfig(num_beams=4)

    needs: ClassVar[tuple[str, ...]] = ("source", "target")
    kind: ClassVar[str] = "translate"
    paper: ClassVar[str] = "Vaswani et al. 2017"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, max_length=self.max_length)
        check_room(self.batch_tokens, "max_length", self.max_length)

    def texts(self, rows: Rows) -> Iterator[str]:
        for row in rows:
            yield row["source"]
            yield row["target"]

    def build(self, tokenizer: Tokenizer) -> "Translation":
        return Translation(self, tokenizer)


class Translation(TextTask):
    """Metrics: loss (nats a target token) and perplexity; `finish` adds bleu, sacrebleu's BLEU of beam search
    on plain text (0 to 100, its default tokenization).
    """

    stacks = "encoder-decoder"
    sums = 2
    head: HeadConfig = LanguageModelConfig(label_smoothing=0.1)

    def __init__(self, config: TranslationConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config
        self.eos = required(tokenizer.eos_id, "<eos>")
        required(tokenizer.bos_id, "<bos>")

    @property
    def positions(self) -> int:
        return self.config.max_length + ROOM

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        prepared = self.prepare_held_out(rows)
        lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in prepared]
        limit = self.config.max_length
        longest = int(np.argmax(lengths)) if lengths else 0
        if lengths and lengths[longest] > limit and self.config.too_long == "refuse":
            raise too_long(
                f"pair {longest + 1} ({quote(rows[longest]['source'])})", lengths[longest], limit, "drop"
            )
        return [row for row, length in zip(prepared, lengths) if length <= limit]

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        sources = self.tokenizer.encode_batch([row["source"] for row in rows])
        targets = self.tokenizer.encode_batch([row["target"] for row in rows])
        return [
            {"input_ids": [*source, self.eos], "labels": [*target, self.eos]}
            for source, target in zip(sources, targets)
        ]

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens = self.weight(batch)
        nats = model(**batch).loss.double() * tokens
        return torch.stack([nats, nats.new_tensor(tokens)])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        nats, tokens = totals
        loss = nats / max(tokens, 1)
        return {"loss": loss, "perplexity": exp(loss)}

    def finish(self, model: nn.Module, rows: Rows) -> dict[str, float]:
        import sacrebleu

        assert isinstance(model, Transformer)
        kept = list(rows)
        written = self.translate(model, [row["source"] for row in kept])
        return {"bleu": sacrebleu.corpus_bleu(written, [[row["target"] for row in kept]]).score}

    def translate(
        self, model: Transformer, texts: Sequence[str], beam: BeamConfig | None = None
    ) -> list[str]:
        """The translation of each text, by beam search.

        Texts are translated in batches; all of one batch have the room of the longest, `ROOM` tokens more.
        """
        beam = beam or self.config.beam
        sources = [[*ids, self.eos] for ids in self.tokenizer.encode_batch(texts)]
        written = [""] * len(texts)
        for chosen, batch in self.batched(model, sources, self.batch_tokens // beam.num_beams):
            config = GenerationConfig(max_new_tokens=batch["input_ids"].shape[1] + ROOM, beam=beam)
            made = model.generate(batch["input_ids"], batch["attention_mask"], config)
            for i, text in zip(chosen, made.texts(self.tokenizer.decode)):
                written[i] = text.strip()
        return written
