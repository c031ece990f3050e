"""The gallery of claims: what every module states, the runs that follow, their processes, page and list."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyformer import InputError
from polyformer.bench.experiment import (
    DIFFERS,
    OUTCOMES,
    REPRODUCED,
    SOURCES,
    UNSHOWN,
    Verdict,
    conclude,
    concluded,
    joined,
)
from polyformer.bench.gallery import processes, tables
from polyformer.bench.gallery.catalogue import anchor, claims_page, recorded
from polyformer.bench.gallery.job import ORPHANED
from polyformer.bench.gallery.jobs import Job, Measurable, jobs_of, measurables, sources_in
from polyformer.bench.gallery.page import judged, write_page
from polyformer.bench.reproduce.all import AllClaims, run

ROOT = Path(__file__).parents[2]
WITHOUT = {"all", "members"}
"""Modules that state no claim: they run others, or compare members."""


@pytest.fixture(scope="module")
def every() -> list[Measurable]:
    return measurables(absent={})


def features() -> Measurable:
    return measurables(["random-features"])[0]


def jobs(out: Path, seeds: tuple[int, ...] = (0, 1, 2)) -> list[Job]:
    return jobs_of([features()], out, {}, seeds, quick=False)


def test_every_module_states_its_claims(every: list[Measurable]):
    names = {path.stem.replace("_", "-") for path in (ROOT / "src/polyformer/bench/reproduce").glob("*.py")}
    absent: dict[str, str] = {}
    stated = {each.name for each in measurables(absent=absent)} | {*absent}
    assert {name for name in names - stated if name.split("-")[0] not in WITHOUT} == {"--init--"}
    claims = [claim for each in every for claim in each.experiment.claims]
    assert len({claim.name for claim in claims}) == len(claims)
    for claim in claims:
        assert all(dataclasses.asdict(claim).values()), claim.name
        assert not claim.rule.endswith("."), "it is part of a sentence"


def test_quick_settings_and_sources_are_those_of_the_module(every: list[Measurable]):
    places = dict.fromkeys(SOURCES, str(ROOT))
    for each in every:
        assert set(each.experiment.sources.values()) <= SOURCES.keys()
        (job,) = jobs_of([each], ROOT, places, (0,), quick=True)
        assert job.config is not None
        assert not job.lacks
        assert set(each.experiment.quick) <= {field.name for field in dataclasses.fields(each.settings)}


def test_a_run_a_seed_and_what_is_lacking():
    theory, knn, sst2 = (measurables([name])[0] for name in ("linformer-theory", "knn-lm", "electra"))
    assert [job.folder.name for job in jobs_of([theory], Path("out"), {}, (3, 4), False)] == [
        "seed-3",
        "seed-4",
    ]
    assert len(jobs_of([theory], Path("out"), {}, (3, 4), True)) == 1
    (job,) = jobs_of([knn], Path("out"), {"wikitext2": "w"}, (3, 4), False)
    assert job.config is None
    assert job.lacks.startswith("decoder (the folder of a checkpoint that writes")
    (job,) = jobs_of([sst2], Path("out"), {"sst2": "my texts"}, (5,), False)
    assert job.command == "polyformer reproduce electra --sst2 'my texts' --seed 5"
    assert job.title == "electra, seed 5"


def test_sources_are_looked_for_and_named(tmp_path: Path):
    (tmp_path / "sst2").mkdir()
    (tmp_path / "book.txt.gz").write_bytes(b"")
    places = sources_in(str(tmp_path), {"imdb": str(tmp_path / "sst2"), "book": None})
    assert {name: Path(path).name for name, path in places.items()} == {
        "sst2": "sst2",
        "imdb": "sst2",
        "book": "book.txt.gz",
    }
    with pytest.raises(InputError, match="encoder: no such file or folder: absent"):
        sources_in(None, {"encoder": "absent"})


def test_a_record_of_other_settings_is_no_end(tmp_path: Path):
    (job,) = jobs(tmp_path, (1,))
    assert job.config is not None
    assert not job.finished
    conclude(job.of.experiment, job.config, [Verdict(REPRODUCED, "it holds")])
    assert job.finished
    (other,) = jobs_of([features()], tmp_path, {}, (1,), quick=True)
    with pytest.raises(InputError, match="of a run with other settings; choose another place with --out"):
        dataclasses.replace(other, folder=job.folder).finished  # noqa: B018


@pytest.mark.parametrize(
    ("outcomes", "whole"),
    [
        ((REPRODUCED, REPRODUCED), REPRODUCED),
        ((REPRODUCED, DIFFERS, UNSHOWN), DIFFERS),
        ((REPRODUCED, UNSHOWN), UNSHOWN),
    ],
)
def test_several_seeds_are_as_good_as_the_worst(outcomes: tuple[str, ...], whole: str):
    assert joined([Verdict(outcome, "") for outcome in outcomes], "all").outcome == whole


def test_tables_of_seeds_become_one():
    head, parts = tables.split_by_seed(["k", "seed", "loss"], [["4", "0", "1.5"], ["4", "1", "2.5"]])
    assert (head, parts) == (["k", "loss"], [[["4", "1.5"]], [["4", "2.5"]]])
    assert tables.over_seeds(head, parts) == [["4", "2 (1.5 to 2.5)"]]
    assert tables.over_seeds(head, [parts[0], []]) == [["4", "1.5"]], "of unequal lengths all rows"
    assert tables.over_seeds(head, parts[:1]) == [["4", "1.5"]]
    assert tables.summary(["a", "b"]) == "a, b"
    assert tables.shown("0.123456789") == "0.1235"


SCRIPT = """
import json, os, signal, sys
order = json.loads(sys.stdin.readline())
seed = order["settings"]["seed"]
if seed == 1: os.kill(os.getpid(), signal.SIGKILL)
if seed == 2: sys.exit(print("polyformer: no luck") or 2)
if seed == 3: sys.stdin.read()
"""


def test_what_is_killed_or_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "PROGRAM", ("-c", SCRIPT))
    ended: dict[int | None, str] = {}
    processes.Processes(2).run(jobs(tmp_path, (1, 2, 0)), lambda job, why: ended.update({job.seed: why}))
    assert ended == {0: "", 1: "killed by SIGKILL", 2: "no luck"}


def test_an_interrupt_stops_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "PROGRAM", ("-c", SCRIPT))
    pool, ended = processes.Processes(2), list[int | None]()

    def interrupted(job: Job, why: str) -> None:
        ended.append(job.seed)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(jobs(tmp_path, (3, 0, 3, 0)), interrupted)
    assert ended == [0]
    assert not pool.running


def test_a_process_ends_with_its_parent(tmp_path: Path):
    settings = {"steps": 10**6, "out": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, *processes.PROGRAM],
        stdin=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps({"name": "act", "settings": settings}) + "\n")
    process.stdin.close()
    assert process.wait(300) == ORPHANED
    assert concluded(tmp_path) is None


def test_the_page_shows_what_came_out_and_why_the_rest_did_not(tmp_path: Path):
    first, second, third = own = jobs(tmp_path)
    assert first.config is not None
    conclude(first.of.experiment, first.config, [Verdict(DIFFERS, "orthogonal <b>features</b> err more")])
    (first.folder / "random_features.csv").write_text("features,error\n16,0.123456\n")
    (first.folder / "picture.png").write_bytes(b"\x89PNG")
    text = write_page(tmp_path, own, {second: "killed by SIGKILL", third: ""}, quick=False).read_text()
    assert "orthogonal &lt;b&gt;features&lt;/b&gt; err more" in text
    for words in ("0.1235", "data:image/png;base64,", "seed 1: killed by SIGKILL", "not reproduced"):
        assert words in text
    assert "http" not in text.replace("http-equiv", ""), "it needs no network"
    lacking = dataclasses.replace(second, config=None, lacks="book (a book)", folder=tmp_path / "none")
    assert "not run: needs book (a book)" in write_page(tmp_path, [lacking], {}, quick=False).read_text()
    assert judged(own, quick=True)["random-features"].outcome == UNSHOWN


def test_all_goes_on_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = AllClaims(only=("random-features",), seeds=(4, 5), jobs=1, quick=True, out=str(tmp_path))
    page = run(config)
    record = concluded(tmp_path / "random-features" / "seed-4")
    assert record is not None
    assert record["settings"]["seed"] == 4
    assert record["verdicts"]["random-features"]["outcome"] in OUTCOMES
    assert "Quick: sizes so small" in page.read_text()
    assert "random_features.csv" in page.read_text()
    assert run(config) == page
    assert "1 runs, 0 of them to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"only": ("warm",)}, "unknown only 'warm': did you mean 'warmup'"),
        ({"data": "absent"}, "data: no such folder: absent"),
        ({"seeds": ()}, "seeds: expected one or more"),
        ({"jobs": 0}, "jobs"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, wrong: dict[str, object], message: str):
    with pytest.raises(InputError, match=message):
        run(AllClaims(**{"out": str(tmp_path / "out"), **wrong}))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


RECORD = "# R\n\n## What is 1.5, `it`?\n\n<!-- claim warmup | reproduced | 1 | 2026-11-21 | it | ends -->\n"


def test_records_are_read_with_their_heading():
    record = recorded(RECORD)["warmup"]
    assert (record.verdict, record.seeds, record.figures) == (REPRODUCED, 1, "it | ends")
    assert anchor(record.heading) == "what-is-15-it"


@pytest.mark.parametrize(
    "wrong",
    [RECORD.replace("reproduced", "shown"), RECORD + RECORD, RECORD.replace("| 1 |", "| one |")],
)
def test_what_is_no_record_is_refused(wrong: str):
    with pytest.raises(
        InputError, match=r"docs/results.md: <!-- claim warmup .*: expected a claim that has no"
    ):
        recorded(wrong)


def test_runs_that_draw_nothing_have_enough_seeds():
    alike = RECORD.replace("| 1 |", "| any |")
    assert recorded(alike)["warmup"].seeds is None
    text = claims_page(alike)
    assert "(all seeds alike, 2026-11-21;" in text
    assert "Trained figures" not in text
    assert "Trained figures" in claims_page(RECORD)


def test_the_list_has_every_claim_and_its_record(every: list[Measurable]):
    text = claims_page(RECORD)
    assert (
        "**Reproduced**: it | ends (**one seed**, 2026-11-21; [What is 1.5, `it`?](results.md#what-is-15-it))"
        in text
    )
    assert all(f"\n## {claim.name}\n" in text for each in every for claim in each.experiment.claims)
    with pytest.raises(InputError, match="records of claims that no module states: warm"):
        claims_page(RECORD.replace("claim warmup", "claim warm"))
