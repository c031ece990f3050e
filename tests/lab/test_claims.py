"""Every claim: its file, a run of some seconds, and the verdict that follows from the recorded figures."""

import csv
import html
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from small_sources import write_sources

from forking import processes
from polyformer.models.architectures import build_model
from polyformer.training.recipes import Recipe
from polyformer_lab import costs, engine
from polyformer_lab.catalogue import recorded, result_pages
from polyformer_lab.results import OUTCOMES, read_csv
from polyformer_lab.rules import check_rules, find_faults
from polyformer_lab.study import OF_A_CLAIM, Study, study_names
from registered import EVERYTHING

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).parent / "recorded"
RECORDS = recorded(result_pages(ROOT / "docs"))
STUDIES = {name: Study.load(name) for name in study_names()}
CLAIMS = {name: claim for study in STUDIES.values() for name, claim in study.claims.items()}


def cells(study: Study) -> int:
    return math.prod(map(len, study.in_quick().grid.values()))


def run_by_default() -> list[str]:
    """Return the studies that have a small run: by day that with the fewest cells."""
    return sorted(STUDIES) if EVERYTHING else [min(STUDIES, key=lambda name: cells(STUDIES[name]))]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("sources"))


def test_every_claim_is_stated_in_full_and_recorded():
    texts = [key for key in OF_A_CLAIM if key not in ("define", "shown")]
    incomplete = [name for name, claim in CLAIMS.items() if not all(getattr(claim, key) for key in texts)]
    assert not incomplete
    assert CLAIMS.keys() == RECORDS.keys()
    assert len(CLAIMS) == sum(len(study.claims) for study in STUDIES.values()), "a name is used twice"


@pytest.mark.filterwarnings("ignore:Creating .*WeightUpdater")  # torchrl, when it is imported
@pytest.mark.parametrize("name", run_by_default())
def test_a_small_run_gives_every_verdict(
    name: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(costs, "get_context", lambda _: processes)  # forked, not new: peaks are of a call
    study = STUDIES[name].in_quick()
    running = engine.opened(study, tmp_path, str(sources), {}, f"polyformer reproduce {name}")
    page = engine.run([running], tmp_path / "page.html", quick=True)
    verdicts = {claim: running.results.verdict(study.claims[claim]) for claim in study.claims}
    assert all(verdict is not None and verdict.outcome in OUTCOMES for verdict in verdicts.values()), verdicts
    assert all(html.escape(claim.claim) in page.read_text() for claim in study.claims.values())
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
    assert len(rows) == len(running.results.rows) > 0


@pytest.mark.parametrize("name", sorted(STUDIES.keys() - run_by_default()))
def test_every_other_study_has_recipes_of_models(name: str, sources: Path, tmp_path: Path):
    study = STUDIES[name].in_quick()
    running = engine.opened(study, tmp_path, str(sources), {}, f"polyformer reproduce {name}")
    running.begin()
    with torch.device("meta"):
        for recipe in (Recipe.from_dict(cell.recipe) for cell in running.cells if cell.recipe is not None):
            if recipe.model.pretrained is None:
                build_model(recipe.model_config())
    assert running.cells


@pytest.mark.parametrize("name", [name for name in study_names() if STUDIES[name].claims])
def test_recorded_figures_give_the_recorded_verdicts_and_seeds(name: str):
    study = STUDIES[name]
    assert list(find_faults(study, read_csv(study, RECORDED / f"{name}.csv"), RECORDS)) == []


def test_the_lead_of_exits_by_confidence_is_that_of_its_figures():
    """The line through the thresholds above each fixed exit that it spans."""
    rows = read_csv(STUDIES["calm"], RECORDED / "calm.csv").rows
    points: dict[str, list[tuple[float, float]]] = {
        by: sorted((row["layers"], row["consistency"]) for row in rows if row.get("by") == by)
        for by in ("confidence", "depth")
    }
    layers, line = zip(*points["confidence"])
    leads = [y - np.interp(x, layers, line) for x, y in points["depth"] if layers[0] <= x <= layers[-1]]
    (summary,) = [row for row in rows if "lead" in row]
    assert summary["compared"] == len(leads) == 3
    assert summary["lead"] == pytest.approx(-max(leads), abs=1e-4)  # layers are rounded


def test_some_figures_contradict_every_rule():
    for study in STUDIES.values():
        check_rules(study)
