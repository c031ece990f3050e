"""Vision Transformers by name: as many parameters as published."""

from typing import Any

import pytest
import torch

from polyformer.models.presets import create_model

MILLIONS = {
    "vit-base-patch16-224": 86.6,
    "vit-large-patch16-224": 304.3,
    "vit-huge-patch14": 632.0,
    "vit-base-patch32-384": 88.3,
    "deit-tiny-patch16-224": 5.7,
    "deit-small-patch16-224": 22.1,
    "deit-base-patch16-224": 86.6,
}


@pytest.mark.parametrize("name", MILLIONS)
def test_parameters(name: str):
    """With 1000 classes."""
    with torch.device("meta"):
        model: Any = create_model(name)
    assert model.config.head.num_labels == 1000
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == MILLIONS[name]
