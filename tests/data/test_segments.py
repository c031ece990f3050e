"""Documents in order: rows go on from batch to batch, each token is predicted once, any place is found."""

import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer.data.rows.packing import IGNORED, Segments

PAD = 99


def texts(count: int = 9) -> list[list[int]]:
    """Documents of different lengths, of tokens that occur once."""
    draw, start, result = np.random.default_rng(0), 100, []
    for length in draw.integers(2, 23, count):
        result.append(list(range(start, start + length)))
        start += length
    return result


def side_by_side(segments: Segments, *epochs: int) -> dict[str, Tensor]:
    """The batches of the epochs, each row as one."""
    batches = [batch for epoch in epochs for _, batch in segments.epoch(epoch)]
    assert all(batch["input_ids"].shape[1] <= segments.length for batch in batches)
    return {name: torch.cat([batch[name] for batch in batches], 1) for name in batches[0]}


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_token_is_predicted_once_from_the_one_before_it(rows: int, shuffle: bool):
    documents = texts()
    whole = side_by_side(Segments(documents, 7, rows, shuffle=shuffle, pad_id=PAD), 0)
    labelled = whole["shift_labels"] != IGNORED
    assert torch.equal(whole["shift_labels"][labelled], whole["input_ids"][labelled] + 1)
    predicted = sorted(whole["shift_labels"][labelled].tolist())
    expected = sorted(token for document in documents for token in document[1:])
    assert len(set(predicted)) == len(predicted)
    assert set(predicted) <= set(expected)
    missing = len(expected) - len(predicted)
    assert missing <= (rows - 1 if shuffle else 0)  # where a row is cut
    inside = labelled[:, :-1]
    assert torch.equal(whole["shift_labels"][:, :-1][inside], whole["input_ids"][:, 1:][inside])


def test_numbers_of_documents_rise_over_epochs_and_tell_all_apart():
    documents = texts()
    whole = side_by_side(Segments(documents, 7, 3, pad_id=PAD), 0, 1, 2)
    numbers, ids = whole["document_ids"], whole["input_ids"]
    assert bool((numbers.diff(dim=1) >= 0).all())
    owner = {token: place for place, document in enumerate(documents) for token in document} | {PAD: -1}
    belongs = torch.tensor([[owner[token] for token in row] for row in ids.tolist()])
    changes = (belongs.diff(dim=1) != 0) & (belongs[:, 1:] >= 0)
    assert bool((numbers.diff(dim=1)[changes] > 0).all())
    again = ids[:, 1:] < ids[:, :-1]  # the next epoch begins
    assert bool((numbers.diff(dim=1)[again & (belongs[:, 1:] >= 0)] > 0).all())


def test_an_epoch_is_found_again_at_any_batch():
    segments = Segments(texts(), 5, 2, seed=3, pad_id=PAD)
    for epoch in (0, 2):
        whole = list(segments.epoch(epoch))
        for start, (position, _) in enumerate(whole):
            rest = list(segments.epoch(epoch, position=position))
            assert len(rest) == len(whole) - start - 1
            for (_, ours), (_, expected) in zip(rest, whole[start + 1 :]):
                assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_orders_are_of_seed_and_epoch_alone():
    def order(seed: int, epoch: int) -> list[int]:
        return side_by_side(Segments(texts(), 5, 2, seed=seed, pad_id=PAD), epoch)["input_ids"].tolist()

    torch.manual_seed(1)
    first = order(0, 0)
    torch.manual_seed(2)
    assert order(0, 0) == first
    assert order(0, 1) != first
    assert order(1, 0) != first


def test_held_out_documents_are_whole_and_rows_nearly_equal():
    documents = texts(20)
    rows = Segments(documents, 7, 4, shuffle=False, pad_id=PAD).laid(0)
    for document in documents:
        places = np.argwhere(rows.ids == document[0])
        (row, column) = places[0]
        length = min(len(document), rows.ids.shape[1] - column)
        assert rows.ids[row, column : column + length].tolist() == document[:length]
    filled = (rows.ids != PAD).sum(1)
    assert filled.max() - filled.min() <= max(map(len, documents))
    assert Segments(documents[:2], 7, 4, shuffle=False).laid(0).ids.shape[0] == 2
