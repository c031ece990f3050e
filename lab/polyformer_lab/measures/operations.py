"""Operations of pre-training encoders, counted as in Clark et al. 2020 (appendix G).

The count contains the products of matrices and of attention, three times for a step with forward and
backward, and no elementwise operations.
"""

import dataclasses

import torch
from torch import nn

from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.nn.heads import DetectConfig, MaskedConfig
from polyformer.training.tasks.masked import ElectraConfig, MaskedDocumentsConfig, generator_config


def operations(task: MaskedDocumentsConfig, model: ModelConfig) -> float:
    """Return the operations of training per token: of masked modelling, or of ELECTRA's two models."""
    length, share = task.row_length, task.masking.share
    if not isinstance(task, ElectraConfig):
        return 3 * (
            _body(dataclasses.replace(model, head=MaskedConfig()), length) + 2 * share * _decoder(model)
        )
    generator = generator_config(model, task.generator_size)
    detection = 2 * (model.hidden_size + 1) * model.hidden_size
    model_alone = 3 * (_body(dataclasses.replace(model, head=DetectConfig()), length) + detection)
    drawing = 2 * share * _decoder(generator)  # once more than in training, without a gradient
    return model_alone + 3 * (_body(generator, length) + 2 * share * _decoder(generator)) + drawing


def _body(config: ModelConfig, length: int) -> float:
    """Return the operations per token of one pass through the layers and the projection of the embedding."""
    with torch.device("meta"):
        model = Transformer(config)
    assert config.encoder is not None
    parts = [part for part in (model.encoder, model.encoder_embedding) if part is not None]
    linear = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    matrices = sum(module.weight.numel() for module in linear)
    return 2 * (matrices + 2 * length * config.hidden_size * config.encoder.num_hidden_layers)


def _decoder(config: ModelConfig) -> int:
    """Return the number of weights between a hidden state and its logits over the vocabulary."""
    width = config.embedding.width(config.hidden_size)
    return config.hidden_size * width + width * config.vocab_size
