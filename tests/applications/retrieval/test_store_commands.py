"""From words to what is printed: build, evaluate, generate."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_stores import TEXT

from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.cli.main import main
from polyformer.training.recipes import fit
from tiny_recipes import tiny_recipe

Output = Callable[..., str]


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Output:
    """`output(*words)`: what the command prints."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([*map(str, words), "--device", "cpu"]) == 0
        return capsys.readouterr().out

    return run


def perplexity(table: str, name: str) -> float:
    (line,) = [line for line in table.splitlines() if line.startswith(name)]
    return float(line.split()[-1].replace(",", ""))


def test_a_store_of_a_text_lowers_its_perplexity(
    checkpoint: Path, text: Path, tmp_path: Path, output: Output
):
    store = tmp_path / "store"
    said = output("datastore", "build", checkpoint, text, "--out", store, "--length", 32, "--context", 8)
    assert said == f"{store}: {open_folder(store).manifest.count:,} entries\n"
    held = tmp_path / "held.txt"
    held.write_text(TEXT[200:900])
    table = output("evaluate", checkpoint, "--datastore", store, "--tune", held, "--neighbours", 8)
    alone, together = perplexity(table, f"{held}  "), perplexity(table, f"{held}, with neighbours")
    assert together < alone / 2
    again = output("evaluate", checkpoint, "--datastore", store, "--data", held)
    assert perplexity(again, f"{held}, with") == together
    words = table.splitlines()[0].split()
    typed = output("evaluate", checkpoint, "--datastore", store, "--data", held, *words)
    assert perplexity(typed, f"{held}, with") == pytest.approx(together, rel=1e-3)
    answer = output(
        "generate", checkpoint, "--datastore", store, "--prompt", TEXT[:30], "--max-new-tokens", 9
    )
    assert answer.startswith(TEXT[:30])


def test_the_model_alone_is_measured_as_its_logits_say(
    checkpoint: Path, text: Path, store: Path, output: Output
):
    """Perplexity without neighbours, windows of 32 tokens, 8 of them carried."""
    options = "--lambda", 0.2, "--temperature", 2, "--tokens", 64
    table = output("evaluate", checkpoint, "--datastore", store, "--data", text, *options)
    reader = open_reader(checkpoint, "cpu")
    (ids,) = reader.encode([TEXT[:100]])
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        for start in (0, 24):
            first = max(0, start - 8)
            log_p = reader.model(torch.tensor([ids[first : start + 24]])).logits[0].log_softmax(-1)
            following = torch.tensor(ids[start + 1 : start + 25])
            losses.append(-log_p[start - first :].gather(1, following[:, None]).squeeze(1))
    expected = float(torch.cat(losses).mean().exp())
    assert perplexity(table, f"{text}  ") == pytest.approx(expected, rel=1e-3)


def test_a_run_is_measured_on_its_own_data(
    tmp_path: Path, output: Output, capsys: pytest.CaptureFixture[str]
):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    fit(tiny_recipe(text, data={"test_fraction": 0.25}), tmp_path / "run")
    output("datastore", "build", tmp_path / "run", text, "--out", tmp_path / "store", "--format", "lines")
    options = "--datastore", tmp_path / "store", "--lambda", 0.0, "--temperature", 1
    assert main([*map(str, ("evaluate", tmp_path / "run", *options)), "--device", "cpu"]) == 0
    table, speed = capsys.readouterr()
    for name in ("validation", "test"):
        assert perplexity(table, f"{name}  ") == perplexity(table, f"{name}, with neighbours")
    assert [line.partition(":")[0] for line in speed.splitlines()[-2:]] == ["validation", "test"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lambda", 2, "--temperature", 1), "--lambda: expected a share"),
        (("--lambda", 0.5, "--temperature", 0), "--temperature: expected a number above 0"),
        (("--lambda", 0.5), "--lambda, --temperature: expected both"),
        (("--tune", "x", "--lambda", 0.5), "--tune chooses"),
        (("--lambda", 0.5, "--temperature", 1, "--neighbours", 0), "--neighbours"),
        (("--lambda", 0.5, "--temperature", 1, "--search", "index"), "it has no index"),
        (("--lambda", "much", "--temperature", 1), "--lambda: expected"),
    ],
)
def test_options_of_a_store_that_contradict_are_refused(
    words: tuple[object, ...],
    said: str,
    checkpoint: Path,
    text: Path,
    store: Path,
    capsys: pytest.CaptureFixture[str],
):
    command = ["evaluate", checkpoint, "--datastore", store, "--data", text, *words]
    assert main([*map(str, command)]) == 2
    assert said in capsys.readouterr().err


def test_options_of_a_store_without_one(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", str(checkpoint), "--lambda", "0.5"]) == 2
    assert "--lambda: requires --datastore" in capsys.readouterr().err
    assert main(["generate", str(checkpoint), "--knn-temperature", "0.5"]) == 2
    assert "--knn-temperature: requires --datastore" in capsys.readouterr().err
    assert main(["datastore", "merge", str(checkpoint), "--part", "1"]) == 2
    assert "--part: not an option of `datastore merge`" in capsys.readouterr().err
