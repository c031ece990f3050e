"""The table of relevance leaves no kind out, and holds for every member that is registered."""

import dataclasses
from typing import ClassVar

import members
import pytest
import selection
import shared_models
import torch
from members import every_case, families
from relevance import RELEVANCE
from selection import chosen, cover, kinds, options_of
from torch import Tensor

import registered
from polyformer.attention.patterns import Pattern, SourceSpans
from polyformer.attention.positions import NoPositionConfig, PositionConfig


def test_every_kind_is_in_a_contract():
    concerned = {kind for contract in RELEVANCE.values() for kind in kinds() if contract.concern(kind)}
    assert concerned == kinds()


def test_a_contract_says_why_it_concerns_a_kind_or_not():
    for name, contract in RELEVANCE.items():
        named = [kind for concern in contract.concerns for kind in concern.kinds.split()]
        assert len(named) == len(set(named)), f"{name}: a kind is named once"
        assert set(named) <= kinds(), name
        assert all(concern.why for concern in contract.concerns), name
        assert bool(contract.rest) == (set(named) < kinds()), name


def test_every_member_has_a_case_in_each_contract_of_its_kind():
    registered_members = {
        f"{family.__name__.removesuffix('Config')}-{member.kind}-0"
        for family in families()
        for member in registered.registered(family.kinds)
    } | {f"Pattern-{example.to_text()}" for example in first_patterns()}
    for name, contract in RELEVANCE.items():
        wanted = {member for member in registered_members if contract.concern(member.partition("-")[0])}
        assert wanted <= {case.member for case in chosen(name)}, name


def first_patterns() -> list[Pattern]:
    return [cls.examples()[0] for cls in registered.registered(Pattern.registry) if cls is not SourceSpans]


def test_presets_cover_every_option_that_presets_set():
    presets = [case for case in every_case() if case.kind == "Preset"]
    few = cover(presets)
    assert len(few) < len(presets) or not registered.EVERYTHING
    assert set().union(*map(options_of, few)) == set().union(*map(options_of, presets))


def test_a_member_of_a_user_is_in_the_contracts_of_its_kind(monkeypatch: pytest.MonkeyPatch):
    """By being registered in an installed module, in every example that the contract asks for."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NowhereConfig(NoPositionConfig):
        kind: ClassVar[str] = "nowhere"
        times: int = 1

        @classmethod
        def examples(cls) -> list["NowhereConfig"]:
            return [cls(times=1), cls(times=2)]

    class Himself(Pattern):
        def allows(self, context: object, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return q_idx == kv_idx

    monkeypatch.setattr(registered, "installed_modules", lambda: {__name__})
    monkeypatch.setattr(members, "numbered", members.numbered.__wrapped__)
    every = members.every_case.__wrapped__()
    monkeypatch.setattr(selection, "every_case", lambda: every)
    try:
        for name, contract in RELEVANCE.items():
            cases = [case.member for case in chosen(name)]
            concern = contract.concern("Position")
            assert ("Position-nowhere-0" in cases) == (concern is not None)
            assert ("Position-nowhere-1" in cases) == (concern is not None and registered.EVERYTHING)
            assert ("Pattern-Himself()" in cases) == (contract.concern("Pattern") is not None)
    finally:
        del PositionConfig.kinds["nowhere"], Pattern.registry["Himself"]


def test_a_shared_model_that_was_changed_is_noticed():
    case = every_case()[0]
    model = shared_models.shared(case)
    assert shared_models.shared(case) is model
    model.train()
    with pytest.raises(AssertionError, match="a test has changed the shared model of"):
        shared_models.shared(case)
    model.eval()
    with torch.no_grad():
        next(model.parameters()).mul_(1)
    with pytest.raises(AssertionError, match="a test has changed the shared model of"):
        shared_models.shared(case)
    shared_models.built.cache_clear()
