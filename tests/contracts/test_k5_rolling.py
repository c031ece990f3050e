"""K5 state, with caches that drop each key as soon as it is out of reach."""

import pytest
import test_k5_state as k5
from members import Case
from selection import DECODING, cases
from shared_models import shared

from polyformer.core.sequence import tokens as reach


def rolling(contract: str, *abilities: str) -> list[Case]:
    """Return the cases of a contract with a layer that drops keys."""
    every = cases(contract, "causal", "supports_kv_cache", *abilities, shape=DECODING)
    return [case for case in every if _drops(case)]


def _drops(case: Case) -> bool:
    decoder = shared(case).decoder
    return decoder is not None and any(layer.attention.reach() is not None for layer in decoder.sequence)


@pytest.fixture(autouse=True)
def _without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "BLOCK", 1)
    monkeypatch.setattr(reach, "MARGIN", 0)


@pytest.mark.parametrize("case", rolling("split"), ids=str)
def test_any_split_is_one_pass(case: Case):
    k5.test_any_split_is_one_pass(case)


@pytest.mark.parametrize("case", rolling("kept padding"), ids=str)
def test_padding_stays_padding_in_the_state(case: Case):
    k5.test_padding_stays_padding_in_the_state(case)


@pytest.mark.parametrize("case", rolling("state"), ids=str)
def test_a_state_is_a_value_with_rows(case: Case):
    k5.test_a_state_can_be_reordered(case)
    k5.test_a_state_is_a_value(case)
    k5.test_tokens_can_be_taken_back_or_the_state_says_so(case)
