"""The equations against loops, and everything fast against the equations."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from polyformer.applications.retrieval import search
from polyformer.applications.retrieval.entries import Manifest
from polyformer.applications.retrieval.mixture import (
    Mixture,
    Targets,
    mixed,
    neighbour_probabilities,
    target_shares,
)
from polyformer.applications.retrieval.readers import Reading
from polyformer.applications.retrieval.search import nearest, squared_distances
from polyformer.applications.retrieval.store import FolderStore, MixtureConfig, Neighbours
from polyformer.core.errors import InputError
from tolerances import assert_rounded

V = 11


def random_store(entries: int = 53, width: int = 6) -> FolderStore:
    generator = np.random.default_rng(0)
    keys = generator.normal(size=(entries, width)).astype(np.float16)
    values = generator.integers(0, V, entries).astype(np.int32)
    about = {"model": "m", "tokenizer": "t", "key": "feedforward", "reading": Reading(), "text": ()}
    return FolderStore(Path(), Manifest(dimension=width, count=entries, **about), keys, values)


def queries(count: int, width: int = 6) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def test_the_definition_is_the_equation():
    """Equations 2 and 3, written as loops over neighbours and tokens."""
    store, (query,) = random_store(), queries(1).double()
    keys = torch.from_numpy(store.keys.astype(np.float64))
    distances = [sum((a - b) ** 2 for a, b in zip(query.tolist(), key.tolist())) for key in keys]
    near = sorted(range(len(keys)), key=lambda i: distances[i])[:7]
    total = sum(math.exp(-distances[i] / 2.5) for i in near)
    expected = torch.zeros(V, dtype=torch.float64)
    for i in near:
        expected[store.values[i]] += math.exp(-distances[i] / 2.5) / total
    values = torch.from_numpy(store.values)
    share = neighbour_probabilities(query[None], keys, values, 7, 2.5, V)
    torch.testing.assert_close(share[0], expected, rtol=1e-10, atol=1e-12)
    model = torch.full((1, V), 1 / V, dtype=torch.float64)
    torch.testing.assert_close(mixed(model, share, 0.3), 0.3 * share + 0.7 * model)


@pytest.mark.parametrize(
    ("weight", "neighbours", "temperature"), [(0.3, 7, 2.5), (1.0, 1000, 0.1), (0, 1, 1)]
)
def test_a_mixture_is_the_definition(weight: float, neighbours: int, temperature: float):
    store, keys = random_store(), queries(6)
    config = MixtureConfig(weight=weight, neighbours=neighbours, temperature=temperature)
    logits = torch.randn(3, 2, V)
    stored = torch.from_numpy(store.keys.astype(np.float32)), torch.from_numpy(store.values)
    share = neighbour_probabilities(keys, *stored, neighbours, temperature, V).view(3, 2, V)
    mixture = Mixture(store, config)(logits, keys.view(3, 2, 6))
    torch.testing.assert_close(mixture.exp(), mixed(logits.softmax(-1), share, weight), rtol=1e-4, atol=1e-6)


def test_where_there_is_no_neighbour_the_model_speaks_alone():
    near = Neighbours(
        torch.tensor([[torch.inf, torch.inf], [1.0, torch.inf]]), torch.tensor([[0, 0], [2, 0]])
    )
    log_p = torch.randn(2, V).log_softmax(-1)
    mixture = Mixture(random_store(), MixtureConfig(weight=0.5)).mixed(log_p, near)
    torch.testing.assert_close(mixture[0], log_p[0])
    expected = 0.5 * log_p[1].exp() + 0.5 * torch.nn.functional.one_hot(torch.tensor(2), V)
    torch.testing.assert_close(mixture[1].exp(), expected)


@pytest.mark.parametrize("token", [-1, V])
def test_a_token_that_the_model_has_not(token: int):
    near = Neighbours(torch.tensor([[1.0, 2.0]]), torch.tensor([[0, token]]))
    with pytest.raises(InputError, match=f"a token {token}, beyond"):
        Mixture(random_store(), MixtureConfig()).mixed(torch.zeros(1, V), near)


@pytest.mark.parametrize("order", ["random", "nearer and nearer", "farther and farther"])
def test_the_search_finds_the_nearest_in_any_tiles(order: str, monkeypatch: pytest.MonkeyPatch):
    store = random_store(3000)
    if order != "random":
        far = np.square(store.keys.astype(np.float32) - queries(1).numpy()).sum(1).argsort()
        store = dataclasses.replace(store, keys=store.keys[far[:: 1 if order.startswith("f") else -1]])
    q, keys = queries(9), torch.from_numpy(store.keys).float()
    single = q.square().sum(1, keepdim=True) - 2 * q @ keys.T + keys.square().sum(1)
    differences = (q.unsqueeze(1) - keys).square().sum(2)
    exact = (q.double().unsqueeze(1) - keys.double()).square().sum(2)
    best = exact.topk(20, largest=False)
    for size in (1, 33, 64, 1000, 5000):
        monkeypatch.setattr("polyformer.applications.retrieval.search.tile_rows", lambda *_, size=size: size)
        distances, rows = nearest(q, store.keys, 20)
        assert rows.tolist() == best.indices.tolist()
        assert_rounded(distances, single.gather(1, rows), best.values)
        assert_rounded(squared_distances(q, store.keys, rows), differences.gather(1, rows), best.values)


def test_equal_keys_and_more_neighbours_than_keys():
    keys = np.repeat(np.eye(6, dtype=np.float16), 40, 0)
    distances, rows = nearest(torch.eye(6)[:2], keys, 300)
    assert rows.shape == (2, 240)
    assert sorted(rows[1].tolist()) == list(range(240))
    assert set(rows[1, :40].tolist()) == set(range(40, 80))
    assert distances[1].tolist() == [0.0] * 40 + [2.0] * 200


def test_a_key_that_is_no_number_hides_no_other():
    """As one that is damaged may be."""
    store = random_store(3000)
    keys = store.keys.copy()
    keys[70:90, 2] = np.nan
    rest = np.r_[0:70, 90:3000]
    distances, rows = nearest(queries(4), keys, 500)
    alone, order = nearest(queries(4), keys[rest], 500)
    assert rows.tolist() == rest[order].tolist()
    torch.testing.assert_close(distances, alone)


def test_shares_of_targets_are_those_of_the_mixture():
    store, keys = random_store(), queries(8)
    targets = torch.arange(8) % V
    shares = target_shares(store.search(keys, 20), targets, (5, 20), (0.5, 3.0))
    stored = torch.from_numpy(store.keys.astype(np.float32)), torch.from_numpy(store.values)
    for row, count in enumerate((5, 20)):
        for column, temperature in enumerate((0.5, 3.0)):
            share = neighbour_probabilities(keys, *stored, count, temperature, V)
            expected = share.gather(1, targets[:, None]).squeeze(1)
            torch.testing.assert_close(shares[:, row, column], expected, rtol=1e-4, atol=1e-6)


def test_the_best_mixture_is_the_best_of_all_that_are_tried():
    log_p = torch.log(torch.tensor([0.5, 0.1, 0.2]))
    shares = torch.tensor([[[0.1, 0.2]], [[0.9, 0.3]], [[0.0, 0.3]]])
    targets = Targets(log_p, shares, (4,), (1.0, 2.0), (0.0, 0.0))
    config, loss = targets.best()
    for weight in (0.0, 0.1, 0.36, 0.5, 0.9):
        for column in range(2):
            p = weight * shares[:, 0, column] + (1 - weight) * log_p.exp()
            assert float(-p.log().mean()) >= loss - 1e-3
    column = targets.temperatures.index(config.temperature)
    p = config.weight * shares[:, 0, column] + (1 - config.weight) * log_p.exp()
    assert loss == pytest.approx(float(-p.log().mean()), rel=1e-5)
    assert float(targets.losses(0.0)[0, 0]) == pytest.approx(float(-log_p.mean()))


def test_a_gpu_takes_the_keys_of_several_queries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, rows = random_store().keys, torch.randint(53, (7, 4))
    rows[2, 1:] = -1
    expected = squared_distances(queries(7), keys, rows)
    assert expected.isinf().any()
    monkeypatch.setattr(search, "queries_together", lambda numbers, device: 3)
    torch.testing.assert_close(squared_distances(queries(7), keys, rows), expected)
    monkeypatch.undo()
    meta = torch.device("meta")
    assert search.queries_together(search.TILE // 3, meta) == 3
    assert (
        search.queries_together(2 * search.TILE, meta) == search.queries_together(1, torch.device("cpu")) == 1
    )


def test_keys_stay_on_a_device_with_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, meta = random_store().keys.copy(), torch.device("meta")
    assert search.resident(keys, meta).device.type == "cpu"  # its free memory is unknown
    free = 2 * keys.nbytes
    monkeypatch.setattr(search, "_free_memory", lambda device: free)
    copy = search.resident(keys, meta)
    assert copy.is_meta
    assert search.resident(keys, meta) is copy
    assert search.resident(keys.copy(), meta) is not copy
    assert search.resident(keys, torch.device("cpu")).data_ptr() == keys.ctypes.data
    del keys
    assert not search._copies
