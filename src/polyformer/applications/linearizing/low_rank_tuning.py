"""Low-rank tuning: every projection W becomes W + B A while the model learns to predict a text.

A [r, in] and B [out, r] are the only weights that learn, and are added to W at the end. Hu et al. 2022
(LoRA), section 4.1, by the package peft; Zhang et al. 2025 (LoLCATs), section 3.2.
"""

import warnings
from typing import Any, cast

import torch
from torch import Tensor

from polyformer.applications.linearizing.steps import Show, Steps
from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra
from polyformer.models.architectures import Transformer
from polyformer.training.machine import autocast

RANK, RATE = 8, 1e-3
TARGETS = ["query", "key", "value", "output", "up", "down"]
"""The projections that are tuned, by the ends of their names."""


def check_tunable(model: Transformer) -> None:
    """Raise `InputError` for a model that is not decoder-only, and without the package peft."""
    if model.decoder is None or model.encoder is not None:
        raise InputError("tune: expected a decoder-only model, which predicts the next token of a text")
    with needs_extra("linearize", "low-rank tuning needs the package peft"):
        import peft  # noqa: F401


def tune_low_rank(model: Transformer, steps: Steps, show: Show = lambda tokens, loss: None) -> Transformer:
    """Return the decoder tuned on the rows; its weights have the same names and shapes as before.

    Raises `InputError` as `check_tunable`.
    """
    check_tunable(model)
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft does not know the class of the model
        options = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
        tuned = peft.get_peft_model(cast(Any, model), options)
    device = next(model.parameters()).device
    weights = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    tuned.train()

    def backward(ids: Tensor) -> float:
        with autocast(steps.precision, device):
            loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach())

    steps.train(torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0), backward, show)
    merged = cast(Any, tuned).merge_and_unload()
    return cast(Transformer, merged.eval().requires_grad_(True))
