"""Statements of five lecture texts (docs/seeds.md) about the sizes of public models."""

import pytest

from polyformer.cli.documentation import parameters
from polyformer.models.presets import model_config


def test_distilbert_has_forty_percent_fewer_parameters():
    assert 1 - parameters("distilbert-base") / parameters("bert-base") == pytest.approx(0.4, abs=0.02)


def test_albert_saves_parameters_twice():
    """By a token table of width 128 instead of 768, and by one layer's weights for all twelve."""
    bert, albert = model_config("bert-base"), model_config("albert-base")
    assert albert.encoder is not None
    assert bert.encoder is not None
    assert albert.encoder.num_hidden_layers == bert.encoder.num_hidden_layers == 12
    assert albert.hidden_size == bert.hidden_size == 768
    table = 30000 * 768 - (30000 * 128 + 128 * 768)
    layers = 11 * (12 * 768**2 + 13 * 768)
    saved = parameters("bert-base") - parameters("albert-base")
    assert saved == pytest.approx(table + layers, rel=0.02)
