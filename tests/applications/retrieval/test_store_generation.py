"""Texts written by the mixture: every token is what the definition says, in every search."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_stores import tiny_model

from polyformer.applications.retrieval.entries import Manifest
from polyformer.applications.retrieval.mixture import Mixture, mixed, neighbour_probabilities
from polyformer.applications.retrieval.readers import Reading
from polyformer.applications.retrieval.store import FolderStore, MixtureConfig
from polyformer.models.architectures import Transformer
from polyformer.nn.stack.last_feedforward import LastFeedForwardInput

V = 260
CONFIG = MixtureConfig(weight=0.6, temperature=3.0, neighbours=12)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return tiny_model()


@pytest.fixture(scope="module")
def store(model: Transformer) -> FolderStore:
    """Of a random text's contexts."""
    ids = torch.randint(3, V, (4, 60), generator=torch.Generator().manual_seed(3))
    last = LastFeedForwardInput(model.decoder)
    with torch.no_grad(), last:
        model(ids)
        keys = last.value[:, :-1].flatten(0, 1).half().numpy()
    about = {"model": "m", "tokenizer": "t", "key": "feedforward", "reading": Reading(), "text": ()}
    values = ids[:, 1:].flatten().numpy().astype(np.int32)
    return FolderStore(Path(), Manifest(dimension=16, count=len(keys), **about), keys, values)


@torch.no_grad()
def next_probabilities(model: Transformer, store: FolderStore, ids: torch.Tensor) -> torch.Tensor:
    """p [V] of the token after ids [T], from the whole text at once, by the definition."""
    last = LastFeedForwardInput(model.decoder)
    with last:
        logits = model(ids[None]).logits[:, -1]
        key = last.value[:, -1]
    stored = torch.from_numpy(store.keys.astype(np.float32)), torch.from_numpy(store.values)
    share = neighbour_probabilities(key, *stored, CONFIG.neighbours, CONFIG.temperature, V)
    return mixed(logits.softmax(-1), share, CONFIG.weight)[0]


def prompts(count: int, length: int) -> torch.Tensor:
    return torch.randint(3, V, (count, length), generator=torch.Generator().manual_seed(5))


def test_greedy_search_takes_the_likeliest_of_the_mixture(model: Transformer, store: FolderStore):
    mixture, ids = Mixture(store, CONFIG), prompts(3, 7)
    output = model.generate(ids, max_new_tokens=10, eos_token_id=(), mixture=mixture)
    plain = model.generate(ids, max_new_tokens=10, eos_token_id=())
    assert not torch.equal(output.sequences, plain.sequences)
    for row, score in zip(output.sequences, output.scores):
        total = 0.0
        for place in range(7, 17):
            p = next_probabilities(model, store, row[:place])
            assert float(p[row[place]]) == pytest.approx(float(p.max()), rel=1e-4)
            total += float(p[row[place]].log())
        assert float(score) == pytest.approx(total, rel=1e-3)


def test_rows_of_a_batch_are_written_as_if_alone(model: Transformer, store: FolderStore):
    mixture, ids = Mixture(store, CONFIG), prompts(2, 9)
    ids[0, :4] = 0
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    both = model.generate(ids, mask, max_new_tokens=8, eos_token_id=(), mixture=mixture).sequences
    alone = model.generate(ids[:1, 4:], max_new_tokens=8, eos_token_id=(), mixture=mixture).sequences
    assert both[0, 4:].tolist() == alone[0].tolist()


def test_beams_have_the_probability_of_the_mixture(model: Transformer, store: FolderStore):
    mixture, ids = Mixture(store, CONFIG), prompts(2, 5)
    settings = {"max_new_tokens": 6, "num_beams": 3, "eos_token_id": (), "length_penalty": 0.0}
    output = model.generate(ids, mixture=mixture, **settings)
    greedy = model.generate(ids, mixture=mixture, max_new_tokens=6, eos_token_id=())
    for row, score, least in zip(output.sequences, output.scores, greedy.scores):
        total = sum(
            float(next_probabilities(model, store, row[:place])[row[place]].log()) for place in range(5, 11)
        )
        assert float(score) == pytest.approx(total, rel=1e-3)
        assert float(score) >= float(least) - 1e-3


def test_samples_follow_the_mixture(model: Transformer, store: FolderStore):
    mixture, ids = Mixture(store, CONFIG), prompts(1, 6)
    p = next_probabilities(model, store, ids[0])
    output = model.generate(
        ids, mixture=mixture, do_sample=True, seed=1, max_new_tokens=1, num_return_sequences=4000
    )
    counts = torch.bincount(output.sequences[:, -1], minlength=V)
    assert float((counts / 4000 - p).abs().sum()) < 0.25
    likeliest = int(p.argmax())
    assert float(counts[likeliest]) / 4000 == pytest.approx(float(p[likeliest]), abs=0.04)


def test_drafts_change_nothing(model: Transformer, store: FolderStore):
    mixture, ids = Mixture(store, CONFIG), prompts(1, 6).repeat(1, 3)
    plain = model.generate(ids, max_new_tokens=20, eos_token_id=(), mixture=mixture)
    for draft in ("lookup", tiny_model(1)):
        drafted = model.generate(ids, max_new_tokens=20, eos_token_id=(), mixture=mixture, draft=draft)
        assert drafted.sequences.tolist() == plain.sequences.tolist()


def test_no_hook_is_left_behind(model: Transformer, store: FolderStore):
    model.generate(prompts(1, 4), max_new_tokens=2, mixture=Mixture(store, CONFIG))
    assert not model.decoder.sequence[-1].feedforward._forward_pre_hooks
