"""Linear probes of encoders, and the counted operations of their pre-training."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from polyformer.data import Tokenizer, TokenizerConfig
from polyformer.models.architectures import Transformer
from polyformer.models.presets import model_config
from polyformer.training.recipes import Recipe
from polyformer.training.tasks import MaskedModelling, MaskedModellingConfig
from polyformer.training.tasks.masked import ElectraConfig
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.measures.compute import operations
from polyformer_lab.measures.encoders import features, probed
from polyformer_lab.study import Study


def test_operations_worked_by_hand():
    """Two layers of 32 with 4 heads, 16 tokens, 100 words; a generator of one head of 8."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128}
    model = model_config("encoder-small", {**sizes, "vocab_size": 100})
    layers = 2 * (4 * 32 * 32 + 2 * 32 * 128)  # four projections, feed-forward up and down
    own = 2 * (layers + 2 * 16 * 32 * 2)  # and queries by keys, and probabilities by values
    small = 2 * (2 * (4 * 8 * 8 + 2 * 8 * 32) + 32 * 8 + 2 * 16 * 8 * 2)  # and what fits 32 to 8
    masked, drawn = (2 * 0.15 * (width * 32 + 32 * 100) for width in (32, 8))
    detecting = 2 * (32 * 32 + 32)
    assert operations(MaskedModellingConfig(row_length=16), model) == pytest.approx(3 * (own + masked))
    assert operations(ElectraConfig(row_length=16), model) == pytest.approx(
        3 * (own + detecting) + 3 * (small + drawn) + drawn
    )


def test_both_pre_trainings_have_as_many_operations(tmp_path: Path):
    study = Study.load("electra")
    cells = cells_of(study, tmp_path, Sources(study.needs, None, {}))
    recipes = [Recipe.from_dict(cell.recipe) for cell in cells if cell.seed == 0 and cell.recipe is not None]
    mlm, electra = (
        operations(each.task, dataclasses.replace(each.model_config(), vocab_size=4000)) * each.training.steps
        for each in recipes
    )
    assert mlm == pytest.approx(electra, rel=1e-3)


def small() -> tuple[MaskedModelling, Transformer]:
    tokenizer = Tokenizer.train(TokenizerConfig(algorithm="bytes"), [])
    task = MaskedModellingConfig(row_length=32, batch_tokens=128).build(tokenizer)
    torch.manual_seed(0)
    return task, Transformer(task.adapt(model_config("encoder-tiny", {"hidden_size": 16}))).eval()


def test_features_are_means_over_a_texts_own_tokens():
    task, model = small()
    texts = ["a short text", "and a text that is cut, for it is longer than a row", "x"]
    results = features(task, model, texts)
    assert results.shape == (2, 3, 16)
    ids = [task.rows.cls, *task.tokenizer.encode(texts[1])[:30], task.rows.sep]
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer, state in enumerate(states):
        np.testing.assert_allclose(results[layer, 1], state[0].mean(0).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_probe_reads_what_the_mean_tells_and_chance_where_labels_are_random():
    """The label is told by the share of a letter."""
    task, model = small()
    chance = random.Random(0)

    def labelled(count: int) -> list[tuple[str, str]]:
        labels = [chance.randrange(2) for _ in range(count)]
        texts = ["".join(chance.choice(("aab", "abb")[label]) for _ in range(20)) for label in labels]
        return [(text, str(label)) for text, label in zip(texts, labels)]

    train, test = labelled(120), labelled(60)
    assert probed(task, model, train, test)["test.accuracy"] > 0.8
    train, test = ([(text, str(chance.randrange(2))) for text, _ in part] for part in (train, test))
    assert probed(task, model, train, test)["test.accuracy"] < 0.75
