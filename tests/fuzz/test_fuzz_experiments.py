"""Experiments, their rules and their rows of figures with anything in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import cases, changed_data, changed_text, survives
from hypothesis import given
from hypothesis import strategies as st

from polyformer.core.parsing import dump_yaml
from polyformer.models.plugins import require_imported
from polyformer.training.recipes import Recipe
from polyformer_lab.cells import Cell, cells_of
from polyformer_lab.comparison import HEAD, differences
from polyformer_lab.expression import evaluate
from polyformer_lab.machine import Sources
from polyformer_lab.results import by_name, results_of, write_csv
from polyformer_lab.rules import Invented, check_labels, check_rules
from polyformer_lab.study import CLAIMS, Study, study_names

TEXTS = {name: (CLAIMS / f"{name}.yaml").read_text(encoding="utf-8") for name in study_names()}
SMALL = {
    "claim": "a wider model learns more",
    "grid": {"width": {8: {"model.hidden_size": 8}, 16: {}}, "block": {"pre": {}, "post": {}}},
    "base": {"model": {"preset": "decoder-tiny"}},
    "seeds": [0, 1],
    "define": {"gain": "loss[8, pre] - loss[16, pre]", "all": "growth(loss[:, pre])"},
    "shown": ["first(all) > 0"],
    "holds": ["gain > -10", "mean(high(loss[8:16, pre])) > abs(min(loss[8, post], 1))"],
    "metrics": ["loss"],
    "plot": {"x": "width", "y": "loss"},
}
FIGURES = Invented(3, 0)
RULES = [*SMALL["define"].values(), *SMALL["shown"], *SMALL["holds"]]  # type: ignore[attr-defined, misc]


def begun(study: Study, out: Path) -> list[Cell]:
    """All that is done with an experiment before its first run, except for its shared files."""
    require_imported(study.base.get("imports"))
    check_labels(study)
    check_rules(study)
    cells = cells_of(study, out, Sources(study.needs, None, {}))
    for cell in cells[:20]:
        assert cell.folder.resolve().is_relative_to(out.resolve())
        if cell.recipe is not None:
            require_imported(cell.recipe.get("imports"))
            Recipe.from_dict(cell.recipe)
    return cells


@cases(100)
@given(st.data())
def test_experiments(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    text = data.draw(st.sampled_from([dump_yaml(SMALL), *TEXTS.values()]))
    if data.draw(st.booleans()):
        text = dump_yaml(data.draw(changed_data(yaml.safe_load(text))))
    else:
        text = data.draw(changed_text(text))
    path = tmp_path_factory.getbasetemp() / "study.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    survives(lambda: begun(Study.load(str(path)), path.parent / "out"))
    survives(lambda: begun(Study.load(str(path)).in_quick(), path.parent / "out"))


@cases(200)
@given(st.sampled_from(RULES).flatmap(changed_text))
def test_rules(text: str):
    survives(lambda: evaluate(text, FIGURES, {"gain": FIGURES("loss", ())}))


@cases(100)
@given(st.data())
def test_rows_of_figures(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    out = tmp_path_factory.getbasetemp() / "figures"
    study = Study.from_dict({"name": "it", **SMALL})
    cells = begun(study, out)
    kept = {"rows": [{"loss": 1.5, "seconds": 2, "note": "x"}], "facts": {"seconds": 1.0, "date": "today"}}
    for number, cell in enumerate(cells):
        content: Any = data.draw(changed_data(kept)) if number % 3 == 0 else kept
        content = {"settings": cell.settings, **content} if isinstance(content, dict) else content
        cell.folder.mkdir(parents=True, exist_ok=True)
        (cell.folder / "rows.json").write_text(json.dumps(content))

    def read() -> None:
        results = results_of(study, cells)
        by_name(results, study.claims)
        results.table()
        results.curves("width", "loss")
        assert all(len(each.line()) == len(HEAD) for each in differences(results))
        write_csv(results, out / "it.csv")
        assert all(isinstance(cell.facts, str) for cell in cells)

    survives(read)
