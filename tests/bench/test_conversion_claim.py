"""The claim that a trained model takes another attention, at a size that says nothing but runs whole."""

from pathlib import Path

import pytest

from polyformer.bench.reproduce.conversion import ConversionClaim, run
from polyformer.core.errors import InputError

SMALL = {
    "attentions": ("Window(64)", "linformer(k=8, max_length=32)"),
    "length": 32,
    "steps": 2,
    "more": 2,
    "layers": 1,
    "width": 16,
    "heads": 2,
}


def test_every_attention_is_measured_twice(tmp_path: Path, capsys):
    config = ConversionClaim(**SMALL, out=str(tmp_path))  # type: ignore[arg-type]
    results = run(config)
    assert list(results) == ["dense", *config.attentions]
    assert results["Window(64)"][0] == pytest.approx(
        results["dense"][0], rel=1e-5
    )  # the window covers the text
    assert results["Window(64)"][1] == pytest.approx(results["dense"][1], rel=1e-3)
    said = capsys.readouterr().out
    assert "linformer(k=8, max_length=32)" in said
    assert "4 tensors newly initialized" not in said.splitlines()[0]
    assert said.count("of the dense model trained on as long") == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"attentions": ()}, "got none"), ({"attentions": ("Windo(3)",)}, "Windo"), ({"more": 0}, "more")],
)
def test_bad_input(changes: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        ConversionClaim(**changes)  # type: ignore[arg-type]
