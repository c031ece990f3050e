"""K1 to K5, K8 and K11 of whole models in the precisions that people use: float32, and under autocast.

Every output is compared with that of the same model in float64 and by itself; all products that may go
through oneDNN do, which they otherwise do from a certain size on.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch
from members import LENGTH, Case, gradients, score
from selection import DECODING, SHAPES, SINGLE, cases, predicting
from shared_models import plain, shared
from test_k2_masking import DOCUMENTS, padded, read
from test_k5_state import chunked, ids_of, start
from torch import Tensor

from polyformer.core.ops.product_kernels import BATCHED_PRODUCTS, BatchedProducts
from polyformer.models.generation import GenerationConfig
from product_choices import by
from registered import EVERYTHING


@dataclasses.dataclass(frozen=True)
class Precision:
    """What a model computes in, and how far from float64 that may lead it, relative to the output's norm."""

    autocast: torch.dtype | None
    tolerance: float

    def __str__(self) -> str:
        return "float32" if self.autocast is None else str(self.autocast).removeprefix("torch.")

    def inside(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", self.autocast)


PRECISIONS = [
    Precision(None, 1e-4),
    *(Precision(dtype, 16 * torch.finfo(dtype).eps) for dtype in (torch.bfloat16, torch.float16)),
]

FLOAT32, BFLOAT16, FLOAT16 = PRECISIONS

Precise = list[tuple[Case, Precision]]


def precise(several: list[Case], rest: list[Case], precisions: list[Precision], single: Precision) -> Precise:
    """Some cases in several precisions, the rest in a single one, but for the suite of every night."""
    if EVERYTHING:
        several, rest = [*several, *rest], []
    return [*((case, each) for case in several for each in precisions), *((case, single) for case in rest)]


def masking(*abilities: str, shape: tuple[str, ...], float16: bool = False) -> Precise:
    """Mechanisms in every precision, other cases in bfloat16.

    Float16's narrow range shows in a training step and where padding is hidden; the rest is as in bfloat16.
    """
    several, rest = (cases(name, *abilities, shape=shape) for name in ("precise mechanism", "precise rest"))
    return precise(several, rest, PRECISIONS if float16 else PRECISIONS[:2], BFLOAT16)


@pytest.fixture(autouse=True)
def _every_size_through_onednn() -> Iterator[None]:
    with by("onednn"), BATCHED_PRODUCTS.using(BatchedProducts(plain=1, transposed=1)):
        yield


def expected(case: Case, batch: dict[str, Tensor]) -> Tensor:
    """What the case makes of a batch in float64."""
    with torch.no_grad():
        return shared(case)(**batch).last_hidden_state


def assert_near(case: Case, actual: Tensor, exact: Tensor, precision: Precision) -> None:
    assert actual.shape == exact.shape
    assert case.apart(actual, exact) < precision.tolerance


@pytest.mark.parametrize(
    ("case", "precision"),
    precise(cases("every precision"), cases("precision"), PRECISIONS, FLOAT16),
    ids=str,
)
def test_a_training_step_is_near_float64_and_finite(case: Case, precision: Precision):
    """The backward pass too may be called inside autocast."""
    model, batch = shared(case, torch.float32), case.labels(case.batch(length=13))
    with precision.inside():
        output = model(**batch)
        value = score(output) if output.loss is None else output.loss
        assert value.isfinite()
        slopes = gradients(model, value)
    assert_near(case, output.last_hidden_state, expected(case, batch), precision)
    for name, slope in slopes.items():
        assert slope.isfinite().all(), name


@torch.no_grad()
@pytest.mark.parametrize(("case", "precision"), masking(shape=SHAPES, float16=True), ids=str)
def test_padding_is_not_seen(case: Case, precision: Precision):
    model, batch = shared(case, torch.float32), case.batch()
    ids, mask = padded(batch["input_ids"], 3, 2, seed=6)
    with precision.inside():
        hidden = model(**{**batch, "input_ids": ids, "attention_mask": mask}).last_hidden_state
    real = slice(None) if case.shape == "pair" else slice(3, 3 + LENGTH)
    assert_near(case, hidden[:, real], plain(case)[0].last_hidden_state, precision)


@torch.no_grad()
@pytest.mark.parametrize(("case", "precision"), masking("supports_packing", shape=SINGLE), ids=str)
def test_other_documents_are_not_seen(case: Case, precision: Precision):
    model, ids = shared(case, torch.float32), case.batch(length=sum(DOCUMENTS))["input_ids"]
    numbers = torch.tensor([0, 2, 3, 9]).repeat_interleave(torch.tensor(DOCUMENTS)).expand_as(ids)
    with precision.inside():
        hidden = model(ids, document_ids=numbers).last_hidden_state
    alone = [expected(case, {"input_ids": part}) for part in ids.split(DOCUMENTS, 1)]
    assert_near(case, hidden, torch.cat(alone, 1), precision)


@torch.no_grad()
@pytest.mark.parametrize(("case", "precision"), masking("causal", shape=DECODING), ids=str)
def test_the_future_is_not_seen(case: Case, precision: Precision):
    model, batch, key = shared(case, torch.float32), case.batch(), read(case)
    longer = torch.cat([batch[key], batch[key].flip(1), batch[key]], 1)
    with precision.inside():
        hidden = model(**{**batch, key: longer}).last_hidden_state
    assert_near(case, hidden[:, : batch[key].shape[1]], plain(case)[0].last_hidden_state, precision)


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "precision"), masking("causal", "supports_kv_cache", shape=DECODING), ids=str
)
def test_any_split_is_one_pass(case: Case, precision: Precision):
    model, batch = shared(case, torch.float32), case.batch()
    with precision.inside():
        hidden = chunked(case, model, ids_of(case, batch), [4, 1, 2], start(case, model, batch))
    assert_near(case, hidden, expected(case, {**batch, read(case): ids_of(case, batch)}), precision)


@pytest.mark.parametrize(
    ("case", "precision"), precise(predicting("precise generation"), [], PRECISIONS[:2], BFLOAT16), ids=str
)
def test_generation_goes_on_as_in_float64(case: Case, precision: Precision):
    """In half precision two tokens may be as likely as each other: there it only has to run."""
    model, ids = shared(case, torch.float32), case.batch(length=24)["input_ids"]
    config = GenerationConfig(max_new_tokens=4)
    with precision.inside():
        sequences = model.generate(ids, config=config).sequences
    if precision.autocast is None:
        assert torch.equal(sequences, shared(case).generate(ids, config=config).sequences)
