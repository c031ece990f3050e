"""ELECTRA's pre-training: a generator replaces tokens, the model learns to find them. Clark et al. 2020.

    loss = generator's masked language modelling + detection_weight * the model's replaced-token detection

The run's model is the discriminator; the generator, as deep and a fraction as wide, shares its embedding sum
(token and position tables, token types and norm, section 3.2) and is saved beside it. See
`polyformer.objectives.detection` for what is replaced. Rows and masks are those of masked language modelling,
but every hidden token becomes the mask (section 2; the released code leaves 15 % of them as they are).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.architecture import ModelConfig
from polyformer.core.errors import InputError
from polyformer.core.labels import IGNORED
from polyformer.data import MaskingConfig, Tokenizer
from polyformer.data.batching import Batch, Row
from polyformer.feedforward.base import SizedConfig
from polyformer.heads import DetectConfig, HeadConfig, MaskedConfig
from polyformer.model import Transformer
from polyformer.objectives.detection import draw, replaced
from polyformer.position import Learned
from polyformer.tasks.base import MaskingTask, Rows, TaskConfig, check_room, exp
from polyformer.training.config import at_least

GENERATOR = "generator"
"""The generator's folder in that of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElectraConfig(TaskConfig):
    """Find the tokens that a small masked language model, trained beside, put in place of others."""

    row_length: int = 128  # tokens in a row
    packed: bool = True  # False: no row holds parts of two documents
    masking: MaskingConfig = MaskingConfig(random_share=0.0, kept_share=0.0)
    generator_size: float = 0.25  # of the model's width, feed-forward and heads; its layers are as many
    detection_weight: float = 50.0

    needs: ClassVar[tuple[str, ...]] = ("text",)
    kind: ClassVar[str] = "electra"
    paper: ClassVar[str] = "Clark et al. 2020, section 2"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, row_length=self.row_length)
        check_room(self.batch_tokens, "row_length", self.row_length)
        if not 0 < self.generator_size <= 1:
            raise InputError(f"generator_size: expected a share in (0, 1], got {self.generator_size}")
        if not self.detection_weight > 0:
            raise InputError(f"detection_weight: expected a number above 0, got {self.detection_weight}")

    def texts(self, rows: Rows) -> Iterator[str]:
        return (row["text"] for row in rows)

    def build(self, tokenizer: Tokenizer) -> "Electra":
        return Electra(self, tokenizer)


@dataclasses.dataclass(frozen=True, eq=False)
class Detected:
    """What the pair made of a batch; [N] are the hidden tokens, row by row."""

    loss: Tensor
    guessing: Tensor  # the generator's mean loss
    input_ids: Tensor  # [B, T], what the discriminator read
    logits: Tensor  # [B, T], the discriminator's
    labels: Tensor  # [B, T], 1 where a token is not the text's, -100 at padding
    guessed: Tensor  # [N], the generator's likeliest tokens


class GeneratorAndModel(nn.Module):
    """Both models as one, as the training loop needs it; `model` is the discriminator."""

    def __init__(self, generator: Transformer, model: Transformer, detection_weight: float):
        super().__init__()
        self.generator, self.model, self.detection_weight = generator, model, detection_weight
        share_embeddings(generator, model)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Detected:
        """`input_ids` with tokens hidden, `labels` these tokens. Held-out text is spoilt alike every time."""
        places = {
            "attention_mask": attention_mask,
            "document_ids": document_ids,
            "position_ids": position_ids,
        }
        guessed = self.generator(input_ids, labels=labels, **places)
        with torch.no_grad():
            hidden = guessed.last_hidden_state[labels != IGNORED, None]
            logits = self.generator.next_logits(dataclasses.replace(guessed, last_hidden_state=hidden))
            same = None if self.training else torch.Generator(input_ids.device).manual_seed(0)
            real = None if attention_mask is None else attention_mask.bool()
            ids, found = replaced(input_ids, labels, draw(logits, same), real)
        output = self.model(ids, labels=found, **places)
        loss = guessed.loss + self.detection_weight * output.loss
        return Detected(loss, guessed.loss, ids, output.logits, found, logits.argmax(-1))


class Electra(MaskingTask):
    """Metrics: loss as trained; of the generator perplexity and accuracy over the hidden tokens; of the model
    detection_loss (nats a token) and accuracy over all tokens, and of the replaced ones the share found
    (recall) and the share they are of those taken for replaced (precision).
    """

    sums = 9
    head: HeadConfig = DetectConfig()

    def __init__(self, config: ElectraConfig, tokenizer: Tokenizer):
        super().__init__(config, tokenizer)
        self.config = config

    @property
    def packs(self) -> bool:
        return self.config.packed

    @property
    def positions(self) -> int:
        return self.config.row_length

    def prepare_held_out(self, rows: Sequence[Row]) -> list[Row]:
        return self.documents(rows, self.config.row_length, self.config.packed)

    def join(self, model: Transformer, run: Path | None = None) -> GeneratorAndModel:
        device = next(model.parameters()).device
        if run is None:
            generator = Transformer(generator_config(model.config, self.config.generator_size))
        else:
            generator = Transformer.from_pretrained(run / GENERATOR)
        joined = GeneratorAndModel(generator.to(device), model, self.config.detection_weight)
        return joined.train(model.training)

    def helpers(self, joined: nn.Module) -> dict[str, Transformer]:
        assert isinstance(joined, GeneratorAndModel)
        return {GENERATOR: joined.generator}

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        output, hidden = model(**batch), batch["labels"]
        hidden = hidden[hidden != IGNORED]
        real = output.labels != IGNORED
        wanted, logits = output.labels[real], output.logits[real]
        nats = F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="sum")
        told, true = logits > 0, wanted == 1
        guesses = output.guessing * len(hidden), (output.guessed == hidden).sum(), len(hidden)
        finds = nats, (told == true).sum(), len(wanted), (told & true).sum(), told.sum(), true.sum()
        return torch.stack(
            [torch.as_tensor(one, device=hidden.device).double() for one in (*guesses, *finds)]
        )

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        guessing, guessed, hidden, nats, right, tokens, found, told, true = totals
        perplexity, detection = guessing / max(hidden, 1), nats / max(tokens, 1)
        return {
            "loss": perplexity + self.config.detection_weight * detection,
            "generator_perplexity": exp(perplexity),
            "generator_accuracy": guessed / max(hidden, 1),
            "detection_loss": detection,
            "accuracy": right / max(tokens, 1),
            "recall": found / max(true, 1),
            "precision": found / max(told, 1),
        }


def generator_config(model: ModelConfig, size: float) -> ModelConfig:
    """As `model` with a share of its width, feed-forward and heads, in whole heads as wide as before."""
    stack = model.encoder
    assert stack is not None
    attention, feedforward = stack.attention, stack.feedforward
    heads = max(1, round(attention.num_attention_heads * size))
    per_head = model.hidden_size / attention.num_attention_heads
    keys = attention.num_key_value_heads
    attention = dataclasses.replace(
        attention, num_attention_heads=heads, num_key_value_heads=keys and math.gcd(keys, heads)
    )
    if isinstance(feedforward, SizedConfig):
        inner = max(1, round(feedforward.intermediate_size * size))
        feedforward = dataclasses.replace(feedforward, intermediate_size=inner)
    return dataclasses.replace(
        model,
        hidden_size=round(heads * per_head),
        embedding=dataclasses.replace(model.embedding, size=model.embedding.width(model.hidden_size)),
        encoder=dataclasses.replace(stack, attention=attention, feedforward=feedforward),
        head=MaskedConfig(),
        origin=None,
    )


def share_embeddings(generator: Transformer, model: Transformer) -> None:
    """Give the generator the model's embedding sum, all but the layer that fits its width."""
    generator.tokens = model.tokens
    mine, other = generator.encoder_embedding, model.encoder_embedding
    assert mine is not None
    assert other is not None
    mine.types, mine.languages, mine.norm = other.types, other.languages, other.norm
    assert generator.encoder is not None
    assert model.encoder is not None
    places, own = generator.encoder.position, model.encoder.position
    if isinstance(places, Learned) and isinstance(own, Learned):
        places.tables[0] = own.tables[0]  # those of later layers are as wide as the stack
