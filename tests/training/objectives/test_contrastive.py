"""The contrastive objective: by hand, its pairs and rows, and that what it trains learns it."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.data import Collate
from polyformer.data.rows.structured import structured
from polyformer.models.presets import create_model
from polyformer.training.objectives import contrastive_loss, hide_sentences, pairs_of

SENTENCES = [[11, 12], [13], [14, 15, 16]]


def test_two_pairs_by_hand():
    """Products [[2, 1], [0, 3]]: by rows log(1 + e^-1) and log(1 + e^-3), by columns with e^-2 for both."""
    predicted = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    encoded = torch.tensor([[2.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    by_rows = (math.log1p(math.exp(-1)) + math.log1p(math.exp(-3))) / 2
    by_columns = math.log1p(math.exp(-2))
    assert contrastive_loss(predicted, encoded).item() == pytest.approx(by_rows, rel=1e-12)
    assert contrastive_loss(predicted, encoded, symmetric=True).item() == pytest.approx(
        (by_rows + by_columns) / 2, rel=1e-12
    )
    half = (math.log1p(math.exp(-2)) + math.log1p(math.exp(-6))) / 2
    assert contrastive_loss(predicted, encoded, temperature=0.5).item() == pytest.approx(half, rel=1e-12)


def test_one_pair_has_nothing_to_tell_apart():
    assert contrastive_loss(torch.randn(1, 3), torch.randn(1, 3)) == 0


def test_gradients_flow_into_both():
    predicted, encoded = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    contrastive_loss(predicted, encoded).backward()
    for side in (predicted, encoded):
        assert side.grad is not None
        assert side.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("predicted", "encoded", "options", "message"),
    [
        ((2, 3), (2, 4), {}, "predicted, encoded: expected the same shape [pairs, width]"),
        ((2,), (2,), {}, "predicted, encoded: expected the same shape [pairs, width], got (2,) and (2,)"),
        ((2, 3), (2, 3), {"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
    ],
)
def test_vectors_of_other_shapes_and_a_temperature_of_zero_are_refused(
    predicted: Any, encoded: Any, options: dict[str, Any], message: str
):
    with pytest.raises(InputError) as caught:
        contrastive_loss(torch.ones(predicted), torch.ones(encoded), **options)
    assert str(caught.value).startswith(message)


def test_pairs_are_found_by_their_numbers():
    pair_ids = torch.tensor([[2, 0, 1, 1, 0, 2], [0, 1, 0, 0, 1, 0]])
    hidden = torch.arange(12.0).view(2, 6, 1)
    predicted, encoded = pairs_of(hidden, pair_ids)
    assert predicted.flatten().tolist() == [2, 0, 7]
    assert encoded.flatten().tolist() == [3, 5, 10]


@pytest.mark.parametrize("numbers", [[1, 0, 0], [1, 1, 1], [1, 2, 0], [1, 1, 2]])
def test_numbers_that_make_no_pairs_are_refused(numbers: list[int]):
    with pytest.raises(InputError, match="pair_ids: "):
        pairs_of(torch.zeros(1, 3, 2), torch.tensor([numbers]))


def test_four_of_a_number_are_refused():
    with pytest.raises(InputError, match="pair_ids: "):
        pairs_of(torch.zeros(1, 4, 2), torch.ones(1, 4, dtype=torch.long))


def test_a_batch_without_pairs_costs_nothing():
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    loss = contrastive_loss(*pairs_of(hidden, torch.zeros(2, 3, dtype=torch.long)))
    loss.backward()
    assert loss == 0
    with pytest.raises(InputError, match=r"pair_ids: expected the shape of the tokens \(2, 3\)"):
        pairs_of(hidden, torch.zeros(2, 4, dtype=torch.long))


def hidden_row(seed: int = 0, **options: Any) -> dict[str, np.ndarray]:
    options = {"mask_id": 4, "global_id": 1, "global_tokens": 8, **options}
    return hide_sentences(SENTENCES, np.random.default_rng(seed), **options)


def test_a_row_by_hand():
    """One of three sentences hidden; each seed hides one, and over seeds all of them."""
    seen = set()
    for seed in range(20):
        row = hidden_row(seed)
        chosen = int(np.flatnonzero(row["pair_ids"])[0])
        seen.add(chosen)
        text = [[4] * len(sentence) if i == chosen else sentence for i, sentence in enumerate(SENTENCES)]
        alone = SENTENCES[chosen]
        assert row["input_ids"].tolist() == [1, 1, 1, *itertools.chain(*text), 1, *alone]
        assert row["document_ids"].tolist() == [0] * 9 + [1] * (1 + len(alone))
        assert row["position_ids"].tolist() == [0, 1, 2, *range(8, 14), 0, *range(8, 8 + len(alone))]
        assert row["segment_ids"].tolist() == [0, 1, 2, 0, 0, 1, 2, 2, 2] + [0] * (1 + len(alone))
        assert row["token_type_ids"].tolist() == [0] * 3 + [1] * 6 + [0] + [1] * len(alone)
        assert np.flatnonzero(row["pair_ids"]).tolist() == [chosen, 9]
        assert row["pair_ids"].max() == 1
    assert seen == {0, 1, 2}


def test_never_all_and_never_none_of_several_sentences():
    assert hidden_row(share=0.99)["pair_ids"].max() == 2
    assert hidden_row(share=0.01)["pair_ids"].max() == 1
    single = hide_sentences([[7, 8]], np.random.default_rng(0), mask_id=4, global_id=1, global_tokens=8)
    assert single["input_ids"].tolist() == [1, 7, 8]
    assert single["pair_ids"].tolist() == [0, 0, 0]
    with pytest.raises(InputError, match="share: expected a share of the sentences in"):
        hidden_row(share=1.0)


def test_the_pairs_of_a_row_are_what_the_sentences_give_apart():
    """p is the document's own pass with the sentence hidden, e a pass of the sentence alone."""
    model = create_model("etc-tiny").double().eval()
    row = hidden_row(3)
    chosen = int(np.flatnonzero(row["pair_ids"])[0])
    batch = Collate(pad_id=0)([row])
    numbers = batch.pop("pair_ids")
    predicted, encoded = pairs_of(model(**batch).last_hidden_state, numbers)

    def output(sentences: list[list[int]], place: int) -> Tensor:
        alone = Collate(pad_id=0)([structured(sentences, global_id=1, global_tokens=8)])
        return model(**alone).last_hidden_state[0, place]

    text = [[4] * len(sentence) if i == chosen else sentence for i, sentence in enumerate(SENTENCES)]
    for actual, expected in (
        (predicted[0], output(text, chosen)),
        (encoded[0], output([SENTENCES[chosen]], 0)),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_model_learns_which_sentence_fits_a_context():
    """Sentences of a document share one word: soon the context tells whose sentence is hidden, out of six."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    model = create_model("etc-tiny", dropout=0.0, initializer_range=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(25):
        rows = []
        for topic in range(50, 56):
            sentences = [[topic, int(generator.integers(100, 300))] for _ in range(3)]
            rows.append(hide_sentences(sentences, generator, mask_id=4, global_id=1, global_tokens=8))
        batch = Collate(pad_id=0)(rows)
        numbers = batch.pop("pair_ids")
        loss = contrastive_loss(*pairs_of(model(**batch).last_hidden_state, numbers), temperature=4.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(6), abs=0.3)
    assert sum(losses[-5:]) / 5 < 0.9
