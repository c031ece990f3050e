"""The Universal Transformer's claim: its verdict, and a small run of the real thing."""

import csv
import dataclasses

import pytest
import torch

from polyformer.bench.reproduce.universal import (
    MODELS,
    NARROW,
    PLACED,
    UNIVERSAL,
    WIDE,
    FromPosition,
    UniversalClaim,
    create,
    fitted,
    run,
    verdict,
)
from polyformer.core.errors import InputError
from polyformer.sequence.tokens import Tokens


def shares(**far: float) -> dict[tuple[str, str, int, int], tuple[float, float]]:
    """Of two seeds, all right at 12 digits; at 24 by model, 0.3 without a word."""
    result = {}
    for name in MODELS:
        for seed in (0, 1):
            result["copy", name, seed, 12] = (far.get("near", 1.0) if name != UNIVERSAL else 1.0, 1.0)
            result["copy", name, seed, 24] = (far.get(name.replace(" ", "_"), 0.3), 0.0)
    return result


def test_verdict_needs_the_universal_one_ahead_of_both_plain_ones():
    good = verdict(shares(universal=0.9), "copy", 12).text
    assert "copy: a Universal Transformer computes on longer strings: reproduced" in good
    assert "not learnt" not in good
    for near in ("equal_parameters", "equal_computation"):
        assert (
            "differs from the paper: a plain one is as good"
            in verdict(shares(universal=0.9, **{near: 0.85}), "copy", 12).text
        )
    assert ": reproduced" in verdict(shares(universal=0.9, **{"the_same,_placed": 0.95}), "copy", 12).text
    slow = verdict(shares(universal=0.9, near=0.5), "copy", 12).text
    assert "reproduced" in slow
    assert f"not learnt at 12 digits either: {NARROW}, {WIDE}" in slow


def test_verdict_needs_longer_strings():
    assert "no verdict" in verdict(shares(), "copy", 24).text


def test_the_models_are_equal_in_what_their_names_say():
    config = UniversalClaim(width=32)
    sizes = {name: sum(p.numel() for p in create(config, name).parameters()) for name in MODELS}
    assert abs(sizes[NARROW] / sizes[UNIVERSAL] - 1) < 0.05
    assert sizes[WIDE] == sizes[PLACED] > 3 * sizes[UNIVERSAL]


def test_source_and_target_begin_where_they_are_told():
    torch.manual_seed(0)
    model = FromPosition(create(UniversalClaim(width=16, heads=2), WIDE)).eval()
    ids = torch.randint(4, 14, (2, 5))
    at = [model(ids, ids, torch.tensor(start)).logits for start in (0, 7)]
    plain = model.model(ids, labels=ids).logits
    torch.testing.assert_close(at[0], plain)
    target = model.model.shifted_right(ids, None)
    for source_from, target_from in ((0, 7), (7, 0), (7, 7)):
        state = model.model.encode(ids, position_ids=torch.arange(source_from, source_from + 5))
        state = dataclasses.replace(state, tokens=Tokens(0, dropped=target_from))
        logits = model.model(decoder_input_ids=target, state=state).logits
        assert torch.allclose(logits, at[1]) == (source_from == target_from)


def test_run_is_taken_up_again(tmp_path, capsys):
    config = UniversalClaim(
        seeds=(0,),
        models=(UNIVERSAL, NARROW, WIDE),
        length=3,
        lengths=(3, 6),
        positions=16,
        rows=2,
        tested=3,
        steps=2,
        layers=2,
        width=16,
        heads=2,
        out=str(tmp_path / "claim"),
    )
    first = run(config)
    assert "copy: a Universal Transformer computes on longer strings: " in capsys.readouterr().out
    with (tmp_path / "claim" / "universal.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(first) == 6
    assert (tmp_path / "claim" / "universal.png").read_bytes().startswith(b"\x89PNG")
    assert run(config) == first
    with pytest.raises(InputError, match="other settings"):
        fitted(UniversalClaim.from_dict({**config.to_dict(), "lr": 0.5}), "copy", UNIVERSAL, 0)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tasks": ("sort",)}, "unknown task 'sort'"),
        ({"lengths": ()}, "lengths, seeds"),
        ({"positions": 12}, "positions: expected twice"),
        ({"width": 12}, "width: expected a multiple of 8"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object], words: str):
    with pytest.raises(InputError, match=words):
        UniversalClaim(**wrong)
