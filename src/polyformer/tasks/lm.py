"""Language modelling: predict the next token; measured by perplexity, per token and per word.

Every document is <bos> text <eos>; documents are packed into rows and do not attend to one another.
"""

import dataclasses
import math
import unicodedata
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.labels import IGNORED, next_labels
from polyformer.data import Tokenizer, pack
from polyformer.data.batching import Batch, Row
from polyformer.generation import Draft, Generated, GenerationConfig, Mixture
from polyformer.heads import HeadConfig, LanguageModelConfig
from polyformer.model import Transformer
from polyformer.tasks.metrics import exp, perplexity_metrics
from polyformer.tasks.text import TextTask, TextTaskConfig, required
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModellingConfig(TextTaskConfig):
    """Predict the next token."""

    row_length: int = 256  # tokens in a row: the longest context
    overlap: int = 1  # tokens that a held-out row repeats of the row before as context, without counting them
    ngram_order: int = 0  # of the n-gram model that a finished run is compared with; 0 for none
    prompt: str = ""  # of the sample that is shown when a run ends

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "lm"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, ngram_order=self.ngram_order)
        if not 1 <= self.overlap < self.row_length:
            raise InputError(
                f"overlap: expected 1 to {self.row_length - 1} (row_length - 1), got {self.overlap}"
            )

    def build(self, tokenizer: Tokenizer) -> "LanguageModelling":
        """The task with `tokenizer`."""
        return LanguageModelling(self, tokenizer)


class LanguageModelling(TextTask):
    """Metrics, all of them from `nats`, the sum of -ln P over every token of the held-out text and its <eos>:

    loss             nats / tokens
    perplexity       exp(loss), per token: comparable under one tokenizer only
    word_perplexity  exp(nats / words): what is published for WikiText. Words are what white space separates,
                     and the end of every line counts as one more (the corpus's <eos>)
    bits_per_byte    nats / ln 2 / bytes of UTF-8 (of the text in NFC)

    The last two are left out where the tokenizer loses part of the text, because its tokens then carry less
    information than the words. The Unicode form of a character (NFC or NFD) is not part of the text.
    """

    config: LanguageModellingConfig
    stacks = "decoder"
    head: HeadConfig = LanguageModelConfig()

    def __init__(self, config: LanguageModellingConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.bos, self.eos = required(tokenizer.bos_id, "<bos>"), required(tokenizer.eos_id, "<eos>")

    @property
    def packs(self) -> bool:
        """True: rows hold parts of several documents."""
        return True

    def documents(self, rows: Sequence[Row]) -> list[list[int]]:
        """The token ids of every text, between <bos> and <eos>."""
        encoded = self.tokenizer.encode_batch([row["text"] for row in rows])
        return [[self.bos, *ids, self.eos] for ids in encoded]

    def prepare(self, rows: Sequence[Row]) -> list[Row]:
        """Packed rows of exactly `row_length` tokens; of less text than that, one padded row."""
        documents = self.documents(rows)
        packed = list(pack(documents, self.config.row_length, last="drop"))
        return packed or list(pack(documents, self.config.row_length, pad_id=self.collate.pad_id))

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        """Packed rows, the last one padded, each with `overlap` tokens of the row before."""
        length, overlap = self.config.row_length, self.config.overlap
        return list(pack(self.documents(rows), length, pad_id=self.collate.pad_id, overlap=overlap))

    def count(self, rows: Sequence[Row]) -> dict[str, float]:
        """Words and bytes of the text; nothing where the tokenizer loses part of it."""
        texts = [composed(row["text"]) for row in rows]
        encoded = self.tokenizer.encode_batch(texts)
        if any(composed(self.tokenizer.decode(ids)) != text for ids, text in zip(encoded, texts)):
            return {}
        words = sum(len(text.split()) + text.count("\n") for text in texts)
        return {"words": words, "bytes": sum(len(text.encode()) for text in texts)}

    def weight(self, batch: Batch) -> int:
        """Tokens that have a next token in their document."""
        return int((next_labels(batch["labels"], batch["document_ids"]) != IGNORED).sum())

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """See the class; the last two only with `counts`."""
        nats, tokens = totals
        return text_metrics(nats, tokens, counts)

    def generate(
        self,
        model: Transformer,
        prompt: str,
        config: GenerationConfig,
        streamer: Callable[[Tensor], None] | None = None,
    ) -> list[str]:
        """Continuations of `prompt`, which begins a document."""
        generated = self.write(model, prompt, config, streamer)
        return generated.texts(self.tokenizer.decode, config.stop)

    def write(
        self,
        model: Transformer,
        prompt: str,
        config: GenerationConfig,
        streamer: Callable[[Tensor], None] | None = None,
        draft: Draft | None = None,
        mixture: Mixture | None = None,
    ) -> Generated:
        """The same as tokens, with what came of a draft (see `polyformer.generation.generate`)."""
        ids = torch.tensor([self.start(prompt)], device=next(model.parameters()).device)
        more = {"draft": draft, "mixture": mixture}
        return model.generate(ids, None, config, streamer, self.tokenizer.decode, **more)

    def start(self, prompt: str) -> list[int]:
        """The token ids of a document that begins with `prompt`."""
        return [self.bos, *self.tokenizer.encode(prompt)]


def composed(text: str) -> str:
    """`text` in NFC."""
    return unicodedata.normalize("NFC", text)


def text_metrics(nats: float, tokens: float, counts: dict[str, float]) -> dict[str, float]:
    """Metrics of `nats` spent on a text: see `LanguageModelling`."""
    metrics = perplexity_metrics(nats, tokens)
    if counts:
        metrics["word_perplexity"] = exp(nats / max(counts["words"], 1))
        metrics["bits_per_byte"] = nats / math.log(2) / max(counts["bytes"], 1)
    return metrics
