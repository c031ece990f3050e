"""The pre-training of ELECTRA: a generator replaces tokens, the model detects them. Clark et al. 2020.

    loss = generator's masked language modelling + detection_weight * the model's replaced-token detection

The model of the run is the discriminator. The generator has the same depth and a fraction of the width,
shares the embeddings (token and position tables, token types and norm, section 3.2) and is saved in a
subfolder. See `polyformer.training.objectives.detection` for the replaced tokens. Rows and masks are the same
as in masked language modelling, but every chosen token becomes <mask> (section 2; the released code keeps 15
% of them).
"""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.positions import Learned
from polyformer.core.host_values import IGNORED
from polyformer.core.ranges import PositiveFloat, PositiveShare
from polyformer.data import MaskingConfig
from polyformer.data.rows.batching import Batch
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.feedforward.feedforward import SizedConfig
from polyformer.nn.heads import DetectConfig, HeadConfig, MaskedConfig
from polyformer.training.objectives.detection import draw, replaced
from polyformer.training.tasks.masking import MaskedDocuments, MaskedDocumentsConfig
from polyformer.training.tasks.metrics import exp, stacked

GENERATOR = "generator"
"""The subfolder of the generator in the folder of a run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElectraConfig(MaskedDocumentsConfig):
    """Replaced-token detection (ELECTRA): detect tokens replaced by a small model that is trained jointly."""

    masking: MaskingConfig = MaskingConfig(random_share=0.0, kept_share=0.0)
    generator_size: PositiveShare = 0.25  # fraction of the model's width, feed-forward and heads; same depth
    detection_weight: PositiveFloat = 50.0

    kind: ClassVar[str] = "electra"
    paper: ClassVar[str] = "Clark et al. 2020, section 2"


@dataclasses.dataclass(frozen=True, eq=False)
class ElectraOutput:
    """The outputs of both models; [N] are the masked tokens, row by row."""

    loss: Tensor
    generator_loss: Tensor  # a mean over the masked tokens
    input_ids: Tensor  # [B, T], the discriminator's input
    logits: Tensor  # [B, T], the discriminator's
    labels: Tensor  # [B, T], 1 where a token was replaced, -100 at padding
    predicted: Tensor  # [N], the generator's most probable tokens


class GeneratorAndModel(nn.Module):
    """Both models as one module for the training loop; `model` is the discriminator."""

    def __init__(self, generator: Transformer, model: Transformer, detection_weight: float):
        super().__init__()
        self.generator, self.model, self.detection_weight = generator, model, detection_weight
        share_embeddings(generator, model)

    def forward(self, input_ids: Tensor, labels: Tensor, **context: Tensor) -> ElectraOutput:
        """Run both models on `input_ids` [B, T] with masked tokens, which are the `labels`.

        context: further inputs of both models. In evaluation the generator draws the same replacements in
        every call.
        """
        masked = self.generator(input_ids, labels=labels, **context)
        with torch.no_grad():
            hidden = masked.last_hidden_state[labels != IGNORED, None]
            logits = self.generator.next_logits(dataclasses.replace(masked, last_hidden_state=hidden))
            seeded = None if self.training else torch.Generator(input_ids.device).manual_seed(0)
            mask = context.get("attention_mask")
            real = None if mask is None else mask.bool()
            ids, is_replaced = replaced(input_ids, labels, draw(logits, seeded), real)
        output = self.model(ids, labels=is_replaced, **context)
        loss = masked.loss + self.detection_weight * output.loss
        return ElectraOutput(loss, masked.loss, ids, output.logits, is_replaced, logits.argmax(-1))


class Electra(MaskedDocuments, config=ElectraConfig):
    """Replaced-token detection; loss is the training loss.

    Metrics of the generator: perplexity and accuracy over the masked tokens. Metrics of the model:
    detection_loss (nats per token) and accuracy over all tokens, and recall and precision of replaced tokens.
    """

    config: ElectraConfig
    sums = 9
    head: HeadConfig = DetectConfig()

    def training_module(self, model: Transformer, run: Path | None = None) -> GeneratorAndModel:
        """Return the model with its generator."""
        device = next(model.parameters()).device
        if run is None:
            generator = Transformer(generator_config(model.config, self.config.generator_size))
        else:
            generator = Transformer.from_pretrained(run / GENERATOR)
        module = GeneratorAndModel(generator.to(device), model, self.config.detection_weight)
        return module.train(model.training)

    def auxiliary_models(self, module: nn.Module) -> dict[str, Transformer]:
        """Return the generator."""
        assert isinstance(module, GeneratorAndModel)
        return {GENERATOR: module.generator}

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return sums of both models.

        For the generator: summed loss, correct predictions, masked tokens. For the model: summed loss,
        correct decisions, tokens; for replaced tokens: true positives, predicted, all.
        """
        output, tokens = model(**batch), batch["labels"]
        tokens = tokens[tokens != IGNORED]
        real = output.labels != IGNORED
        labels, logits = output.labels[real], output.logits[real]
        nats = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="sum")
        positive, actual = logits > 0, labels == 1
        return stacked(
            output.generator_loss * len(tokens),
            (output.predicted == tokens).sum(),
            len(tokens),
            nats,
            (positive == actual).sum(),
            len(labels),
            (positive & actual).sum(),
            positive.sum(),
            actual.sum(),
            device=tokens.device,
        )

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        """Return the metrics of the class."""
        masked_nats, predicted, masked, nats, correct, tokens, true_positive, positive, actual = totals
        generator_loss, detection_loss = masked_nats / max(masked, 1), nats / max(tokens, 1)
        return {
            "loss": generator_loss + self.config.detection_weight * detection_loss,
            "generator_perplexity": exp(generator_loss),
            "generator_accuracy": predicted / max(masked, 1),
            "detection_loss": detection_loss,
            "accuracy": correct / max(tokens, 1),
            "recall": true_positive / max(actual, 1),
            "precision": true_positive / max(positive, 1),
        }


def generator_config(model: ModelConfig, size: float) -> ModelConfig:
    """Return `model` with a fraction `size` of its width, feed-forward and heads; same head dimension."""
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
    """Share the model's embeddings with the generator, except the projection to its width."""
    generator.tokens = model.tokens
    small, large = generator.encoder_embedding, model.encoder_embedding
    assert small is not None
    assert large is not None
    small.types, small.languages, small.norm = large.types, large.languages, large.norm
    assert generator.encoder is not None
    assert model.encoder is not None
    position, shared = generator.encoder.position, model.encoder.position
    if isinstance(position, Learned) and isinstance(shared, Learned):
        position.tables[0] = shared.tables[0]  # tables of later layers have the width of the stack
