"""Neighbours of a text's tokens: those of a plain search, without the token itself; who trains finds them."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from polyformer.applications.retrieval import neighbours as finding
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.cli.main import main
from polyformer.core.errors import InputError
from polyformer.data.rows.neighbours import ROWS, Neighbours
from polyformer.models.architectures import Transformer
from polyformer.training.recipes import Run, fit
from polyformer.training.tasks import LanguageModelling
from tiny_recipes import tiny_recipe

TEXT = "".join(f"{number % 5} bottles hang on wall {number % 7}\n" for number in range(40))
HELD = "".join(f"{number} bottles stand on wall {9 - number}\n" for number in range(5))


def words(*values: object) -> list[str]:
    return [*map(str, values), "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is the frozen model, its store, and the neighbours of the store's text and of another."""
    folder = tmp_path_factory.mktemp("spalm")
    (folder / "train.txt").write_text(TEXT)
    (folder / "held.txt").write_text(HELD)
    fit(tiny_recipe(folder / "train.txt", 2), folder / "run")
    store = folder / "store"
    options = "--length", 16, "--context", 4, "--format", "lines"
    assert (
        main(words("datastore", "build", folder / "run", folder / "train.txt", "--out", store, *options)) == 0
    )
    for name in ("train", "held"):
        assert main(search(folder, name, folder / f"near-{name}")) == 0
    return folder


def search(folder: Path, name: str, out: Path, *more: object) -> list[str]:
    """The command that finds neighbours of the text `name`."""
    places = folder / "run", folder / f"{name}.txt", "--datastore", folder / "store", "--out", out
    return words("datastore", "neighbours", *places, "--format", "lines", *more)


def task_of(folder: Path) -> LanguageModelling:
    task = Run.open(folder / "run").task
    assert isinstance(task, LanguageModelling)
    return task


def documents(folder: Path, name: str) -> list[list[int]]:
    lines = (folder / f"{name}.txt").read_text().splitlines()
    return task_of(folder).rows.documents([{"text": line} for line in lines])


@pytest.mark.parametrize("name", ["train", "held"])
def test_they_are_the_nearest_but_for_the_token_itself(folder: Path, name: str):
    """The keys of all tokens, read in windows of 16 with 4 carried, compared with all of the store's."""
    store = open_folder(folder / "store")
    tokens = [(id, number) for number, text in enumerate(documents(folder, name)) for id in text]
    queries = []
    reader = open_reader(folder / "run", "cpu")
    for start in range(0, len(tokens) - 1, 12):
        first = max(0, start - 4)
        ids, numbers = (torch.tensor([column]) for column in zip(*tokens[first : start + 12]))
        keys, _ = reader.read(ids, numbers - numbers[0, 0])
        queries.append(keys[0, start - first :])
    keys = torch.from_numpy(np.array(store.keys)).double()
    exact = torch.cat(queries)[: len(tokens) - 1].half().double()
    distances = (exact.unsqueeze(1) - keys).square().sum(-1)
    if name == "train":
        assert len(exact) == len(keys)
        assert torch.equal(exact, keys), "each token is an entry"
        distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(4, largest=False)
    rows = np.fromfile(folder / f"near-{name}" / ROWS, np.int32).reshape(-1, 4)
    assert rows.shape == (len(tokens), 4)
    assert (rows[-1] == -1).all()
    farthest = distances.sort(1).values[:, 3:5]
    clear = farthest[:, 1] - farthest[:, 0] > 2e-5  # the fifth is not as near as the fourth
    assert clear.sum() > 10
    expected = store.values[nearest.indices.numpy()]
    np.testing.assert_array_equal(np.sort(rows[:-1][clear]), np.sort(expected[clear]))


def test_a_search_that_was_stopped_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(finding, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(finding, "BATCH_TOKENS", 64)
    assert main(search(folder, "train", tmp_path / "whole")) == 0  # ties fall alike in like batches
    whole, calls = finding.rows_of, []

    def stopping(*arguments: object) -> np.ndarray:
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return whole(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(finding, "rows_of", stopping)
    out = tmp_path / "near"
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(main(search(folder, "train", out)))
    with pytest.raises(InputError, match="not finished; resume by the same polyformer datastore neighbours"):
        Neighbours([out], task_of(folder).tokenizer)
    with (out / ROWS).open("ab") as file:
        file.write(b"what was not synced")
    before = len(calls)
    assert main(search(folder, "train", out)) == 0
    assert len(calls) - before < before + 60
    for name in ("neighbours.json", ROWS, "documents.int64"):
        expected = (tmp_path / "whole" / name).read_bytes()
        assert (out / name).read_bytes() == expected or name == "neighbours.json"
    capsys.readouterr()
    assert main(search(folder, "train", out)) == 0, "a finished one stays as it is"
    assert main(search(folder, "train", out, "--neighbours", 3)) == 2
    assert "started with other input (neighbours)" in capsys.readouterr().err


def test_neighbours_depend_on_no_later_token(folder: Path, tmp_path: Path):
    text = tmp_path / "held.txt"
    text.write_text(HELD[:-5] + "\n\n\n")
    for name in ("store", "run"):
        (tmp_path / name).symlink_to(folder / name)
    assert main(search(tmp_path, "held", tmp_path / "near")) == 0
    before = np.fromfile(folder / "near-held" / ROWS, np.int32).reshape(-1, 4)
    after = np.fromfile(tmp_path / "near" / ROWS, np.int32).reshape(-1, 4)
    same = len(HELD) - 8
    np.testing.assert_array_equal(before[:same], after[:same])


class Places:
    """In place of neighbours: of each token its id, and which of all tokens it is."""

    @staticmethod
    def of(texts: list[list[int]]) -> np.ndarray:
        ids = np.concatenate([np.array(text, np.int32) for text in texts])
        return np.stack([ids, np.arange(len(ids), dtype=np.int32)], 1)


@pytest.mark.parametrize("feed", ["packed", "in_order"])
def test_every_feed_gives_tokens_their_neighbours(folder: Path, feed: Literal["packed", "in_order"]):
    task = task_of(folder)
    config = dataclasses.replace(task.config, feed=feed, neighbours=("near",), overlap=3)
    task = LanguageModelling(config, task.tokenizer)
    vars(task.rows)["neighbours"] = Places()  # type: ignore[index]
    rows = [{"text": line} for line in TEXT.splitlines()]
    plain = LanguageModelling(dataclasses.replace(config, neighbours=()), task.tokenizer)
    for name in ("training_batches", "held_out"):
        batches, others = (
            x.rows.training_batches(rows, 0) if name == "training_batches" else x.rows.held_out(rows).batches
            for x in (task, plain)
        )
        seen = set()
        for (_, batch), (_, other) in zip(batches.epoch(0), others.epoch(0), strict=True):
            ids, places = batch.pop("neighbour_ids").unbind(-1)
            assert all(torch.equal(batch[key], other[key]) for key in batch.keys() | other.keys())
            real = places >= 0
            assert torch.equal(ids[real], batch["input_ids"][real])
            documents = batch["document_ids"]
            follows = real[:, 1:] & (documents[:, 1:] == documents[:, :-1])
            assert bool((places.diff() == 1)[follows].all())
            assert bool((places == -1)[~real].all())
            if "attention_mask" in batch:
                assert torch.equal(real, batch["attention_mask"].bool())
            seen |= set(places[real].tolist())
        assert len(seen) > 0.95 * sum(map(len, task.rows.documents(rows)))


def test_a_model_trains_with_neighbours_and_a_memory(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    near = [str(folder / "near-train"), str(folder / "near-held")]
    spalm = {
        "task": {"feed": "in_order", "neighbours": near, "ngram_order": 0},
        "model": {"position": "transformer_xl", "memory": "recurrent(length=16)", "head": "semiparametric"},
        "data": {"validation": str(folder / "held.txt"), "validation_fraction": 0.0},
        "schedule": {"kind": "constant"},
    }
    whole = fit(tiny_recipe(folder / "train.txt", 6, **spalm), tmp_path / "run")
    weights = whole.model.state_dict()
    assert weights["head.gate.weight"].abs().sum() > 0
    fit(tiny_recipe(folder / "train.txt", 4, **spalm), tmp_path / "again")
    again = fit(tiny_recipe(folder / "train.txt", 6, **spalm), tmp_path / "again", resume=True)
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), "a run that goes on ends as one that was not stopped"
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    search_now = ["--data", folder / "held.txt", "--frozen", folder / "run", "--datastore", folder / "store"]
    assert main(words("evaluate", tmp_path / "run", *search_now)) == 0
    assert capsys.readouterr().out.split()[-6:] == table.split()[-6:], "as those that were found before"
    assert main(words("evaluate", folder / "run", *search_now)) == 2
    assert "trained without neighbours" in capsys.readouterr().err
    assert main(words("evaluate", tmp_path / "run", *search_now[2:])) == 2
    assert "--frozen: requires --datastore and --data" in capsys.readouterr().err
    more = "--prompt", "3 bottles", "--max-new-tokens", 9, *search_now[2:]
    assert main(words("generate", tmp_path / "run", *more)) == 2
    assert "the frozen model reads 16 tokens" in capsys.readouterr().err
    assert main(words("generate", tmp_path / "run", "--prompt", "3", *more[2:])) == 0
    assert capsys.readouterr().out.startswith("3")
    other = tmp_path / "other.txt"
    other.write_text("a line that nobody has searched for\n")
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(other), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "has none in" in error
    assert "of another text; make them by polyformer datastore neighbours" in error
    assert "perplexity" in table
    loaded = Transformer.from_pretrained(tmp_path / "run")
    ids, rows = torch.tensor([[5, 6, 7]]), torch.tensor([[[1, 2], [3, -1], [-1, -1]]])
    torch.testing.assert_close(
        loaded.eval()(ids, neighbour_ids=rows).logits,
        whole.model.cpu().eval()(ids, neighbour_ids=rows).logits,
    )


def damaged(change: Callable[[Path], object]) -> Callable[[Path, Path], Path]:
    """A copy of the neighbours with something changed."""

    def make(folder: Path, tmp_path: Path) -> Path:
        shutil.copytree(folder / "near-held", tmp_path / "near")
        change(tmp_path / "near")
        return tmp_path / "near"

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (damaged(lambda near: (near / ROWS).write_bytes(b"1234")), "expected .* bytes for .* rows, got 4"),
        (damaged(lambda near: (near / "documents.int64").unlink()), "no such file: .*documents.int64"),
        (damaged(lambda near: (near / "neighbours.json").write_text("{}")), "json: damaged"),
        (damaged(lambda near: (near / "neighbours.json").unlink()), "holds no neighbours"),
        (lambda folder, tmp_path: folder / "store", "holds no neighbours"),
    ],
)
def test_a_damaged_folder_is_refused(
    make: Callable[[Path, Path], Path], message: str, folder: Path, tmp_path: Path
):
    with pytest.raises(InputError, match=message):
        Neighbours([make(folder, tmp_path)], task_of(folder).tokenizer)


def test_bad_input_of_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "near"
    (tmp_path / "both").mkdir()
    for name in ("train", "held"):
        shutil.copy(folder / f"{name}.txt", tmp_path / "both")
    fit(tiny_recipe(folder / "train.txt", 1, seed=5), tmp_path / "other")
    lines = "--format", "lines"
    store = "--datastore", folder / "store"
    cases = [
        (("datastore", "neighbours", folder / "run", folder / "held.txt", *store), "--out is missing"),
        ((*search(folder, "held", out)[:-2], "--neighbours", 0), "--neighbours: expected 1 or more, got 0"),
        (
            (*search(folder, "held", out)[:-2], "--lists", 3),
            "--lists: not an option of `datastore neighbours`",
        ),
        (
            (
                "datastore",
                "neighbours",
                folder / "run",
                tmp_path / "both/*.txt",
                *store,
                "--out",
                out,
                *lines,
            ),
            "train.txt: one of the files that the store is of; name all of these",
        ),
        (
            (
                "datastore",
                "neighbours",
                tmp_path / "other",
                folder / "held.txt",
                *store,
                "--out",
                out,
                *lines,
            ),
            "built with another model",
        ),
    ]
    for command, message in cases:
        assert main(words(*command)) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_the_head_and_its_neighbours_go_together(folder: Path, tmp_path: Path):
    for changes in (
        {"model": {"head": "semiparametric"}},
        {"model": {"head": "adaptive_softmax"}, "task": {"neighbours": [str(folder / "near-train")]}},
    ):
        with pytest.raises(InputError, match="neighbours: it and the head 'semiparametric' go together"):
            fit(tiny_recipe(folder / "train.txt", 2, **changes), tmp_path / "run")


def test_another_tokenizer_is_refused(folder: Path):
    from polyformer.data import TokenizerConfig, build_tokenizer

    other = build_tokenizer(TokenizerConfig(algorithm="characters"), ["abc"])
    with pytest.raises(InputError, match="neighbours of another tokenizer"):
        Neighbours([folder / "near-held"], other)
