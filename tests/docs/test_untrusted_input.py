"""Hostile files of each kind in SECURITY.md: no code runs, and nothing outside is read or written."""

import json
import os
import pickle
import shutil
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import torch
import yaml
from pyarrow import parquet
from safetensors.torch import load_file

import polyformer
from polyformer import InputError, from_pretrained
from polyformer.applications.retrieval.store import open_folder
from polyformer.attention.patterns.base import Pattern
from polyformer.cli.main import main
from polyformer.core.files import PICKLES
from polyformer.core.foreign_checkpoints import load_by_transformers
from polyformer.core.ops import tuning as store
from polyformer.core.ops.tuning import forget
from polyformer.core.parsing import parse_yaml
from polyformer.data import DataConfig, load_tokenizer, read
from polyformer.data.prepared import Manifest
from polyformer.data.rows.neighbours import NeighbourInfo
from polyformer.data.sources import files as remote
from polyformer.data.sources.origins import open_source
from polyformer.models.generation import GenerationConfig
from polyformer.models.plugins import IMPORTED_NAMES
from polyformer.models.presets import create_model, model_config
from polyformer.training.metrics import read_metrics
from polyformer.training.recipes.fit import fit
from polyformer.training.recipes.run import Run
from polyformer.training.rl import make_environment
from polyformer_lab.cells import cells_of
from polyformer_lab.machine import Sources
from polyformer_lab.study import Study
from tiny_recipes import TEXT, tiny_recipe


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder from which modules are imported, without settings of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def evil(here: Path) -> Iterator[str]:
    """A Python file; the test fails if it has been run."""
    name = "evil_file"
    Path(f"{name}.py").write_text(f"open({str(here / 'marker')!r}, 'w').close()\n")
    yield name
    assert not (here / "marker").exists()
    assert name not in sys.modules


@pytest.fixture
def trap(here: Path) -> Iterator[bytes]:
    """A pickle; the test fails if it has been loaded."""

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return Path.touch, (here / "marker",)

    yield pickle.dumps(Trap())
    assert not (here / "marker").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").write_text(TEXT)
    fit(tiny_recipe(folder / "text", steps=2), folder / "run")
    return folder / "run"


@pytest.fixture
def run(trained: Path, here: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(trained, here / "run"))


@pytest.fixture
def bert(here: Path) -> Path:
    """A checkpoint as transformers writes it."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    create_model("bert-base", **sizes, vocab_size=20, max_position_embeddings=8).save_pretrained(
        here / "bert", format="hub"
    )
    (here / "bert" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nfox\n")
    return here / "bert"


def test_code_that_is_named_runs(here: Path):
    Path("named_file.py").write_text(f"open({str(here / 'marker')!r}, 'w').close()\n")
    assert main(["list", "window", "--import", "named_file.py"]) == 0
    assert (here / "marker").exists()
    IMPORTED_NAMES.clear()
    calls = []
    x = torch.randn(1, 1, 4, 8)
    polyformer.attend(x, x, x, mask_mod=lambda b, h, q, k: calls.append(q) or q >= k)
    assert calls


@pytest.mark.parametrize(
    ("name", "open_"),
    [
        ("config.json", from_pretrained),
        ("model.safetensors", from_pretrained),
        ("vocab.txt", load_tokenizer),
        ("tokenizer.json", load_tokenizer),
        ("config.json", lambda folder: load_by_transformers("AutoModel", folder)),
        ("store.json", open_folder),
        ("manifest.json", Manifest.read),
        ("neighbours.json", NeighbourInfo.read),
    ],
)
def test_links_out_of_a_folder_are_refused(bert: Path, here: Path, name: str, open_: Callable[[Path], Any]):
    file = bert / name
    (bert / "tokenizer").mkdir()  # of prepared text
    (here / "private").write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    file.symlink_to(here / "private")
    with pytest.raises(InputError, match=f"{name} is a link to a file outside of its folder"):
        open_(bert)


def test_links_of_the_hub_and_of_whole_folders_are_followed(bert: Path, here: Path):
    blobs = here / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (bert / "model.safetensors").rename(blobs / "abcd")
    (bert / "model.safetensors").symlink_to(blobs / "abcd")
    Path("whole").symlink_to(bert)
    assert from_pretrained("whole").config == from_pretrained(bert).config
    assert load_tokenizer("whole").encode("fox") == [5]


def test_a_recipe_reads_data_anywhere(here: Path):
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "private.txt").write_text(TEXT)
    recipe = tiny_recipe(here / "elsewhere" / "private.txt")
    assert next(iter(read(recipe.data, recipe.task.needs, recipe.data.path)))["text"] in TEXT


def test_a_recipe_imports_no_module_of_environments(evil: str):
    pytest.importorskip("gymnasium")
    for words in ((f"{evil}:Own-v0",), ("CartPole-v1", {}, [f"{evil}:Wrapper"])):
        with pytest.raises(InputError, match=f"'{evil}'"):
            make_environment(*words)


def test_figures_of_an_experiment_are_used_as_they_are(here: Path):
    base = {"model": {"preset": "decoder-tiny"}, "data": {"path": "absent.txt"}}
    study = Study.from_dict({"claim": "x", "base": base, "grid": {"a": {"b": {}}}, "seeds": [0]})
    (cell,) = cells_of(study, here, Sources({}, None, {}))
    forged = {"settings": cell.settings, "rows": [{"validation.loss": 123.0}], "facts": {}}
    cell.folder.mkdir()
    (cell.folder / "rows.json").write_text(json.dumps(forged))
    assert cell.run() == [{"validation.loss": 123.0}]


def test_a_changed_run_imports_nothing(evil: str, run: Path, complaint: Callable[..., str]):
    """Neither where its parts are missing nor where they are not."""
    files = run / "recipe.yaml", run / "config.json"
    recipe, config = yaml.safe_load(files[0].read_text()), json.loads(files[1].read_text())

    def change(head: object) -> None:
        own = {"imports": [f"{evil}.py"]}
        model = {**recipe["model"], **({"head": head} if head else {})}
        files[0].write_text(yaml.safe_dump({**recipe, **own, "model": model}))
        files[1].write_text(json.dumps({**config, **own, **({"head": head} if head else {})}))

    commands = (
        ["evaluate", run],
        ["train", "--resume", run],
        ["generate", run, "--prompt", "a", "--max-new-tokens", "2"],
    )
    change(None)
    for words in commands:
        assert main([*map(str, words)]) == 0
    change({"kind": evil})
    for words in commands:
        assert f"it has parts registered by {evil}.py: import that first" in complaint(*words)


@pytest.mark.parametrize("place", ["folder", "file"])
def test_a_run_writes_nothing_through_links(run: Path, here: Path, place: str):
    recipe = tiny_recipe(Path(Run.open(run).recipe.data.path or ""), steps=3)
    outside = here / "outside"
    files = (
        [run / "checkpoints"] if place == "folder" else [path for path in run.rglob("*") if path.is_file()]
    )
    for file in files:
        shutil.rmtree(outside, ignore_errors=True)
        copy = Path(shutil.copytree(run, here / "copy"))
        (shutil.copytree if file.is_dir() else shutil.copy)(file, outside)
        own = copy / file.relative_to(run)
        (shutil.rmtree if own.is_dir() else os.unlink)(own)
        own.symlink_to(outside)
        before = {path: path.is_file() and path.read_bytes() for path in (outside, *outside.rglob("*"))}
        with suppress(InputError):
            fit(recipe, copy, resume=True)
        after = {path: path.is_file() and path.read_bytes() for path in (outside, *outside.rglob("*"))}
        assert after == before, file
        shutil.rmtree(copy)


def test_a_pickle_in_the_place_of_any_file_of_a_run_is_not_loaded(run: Path, here: Path, trap: bytes):
    readers = (
        lambda run: Run.open(run).model("cpu"),
        read_metrics,
        from_pretrained,
        load_tokenizer,
        lambda run: fit(Run.open(run).recipe, run, resume=True),
    )
    names = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    for name in names:
        copy = Path(shutil.copytree(run, here / "copy"))
        (copy / name).write_bytes(trap)
        for reader in readers:
            with suppress(InputError):
                reader(copy)
        shutil.rmtree(copy)
    assert len(names) > 10


def test_what_is_saved_has_no_pickle(run: Path):
    weights = [*run.rglob("*.safetensors")]
    assert len(weights) == 3
    assert all(map(load_file, weights))
    others = [path for path in run.rglob("*") if path.is_file() and path not in weights]
    assert not [path for path in others if path.read_bytes().startswith(PICKLES)]


def test_python_files_beside_weights_are_ignored(evil: str, bert: Path):
    config = json.loads((bert / "config.json").read_text())
    names = {f"Auto{kind}": f"{evil}.Evil" for kind in ("Config", "Model", "ModelForMaskedLM", "Tokenizer")}
    (bert / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    shutil.copy(f"{evil}.py", bert)
    shutil.copy(f"{evil}.py", bert / "modeling_bert.py")
    assert from_pretrained(bert).config.hidden_size == 16
    assert load_tokenizer(bert).encode("fox") == [5]


def test_transformers_reads_no_pickle(bert: Path, trap: bytes):
    (bert / "model.safetensors").unlink()
    (bert / "pytorch_model.bin").write_bytes(trap)
    with pytest.raises(InputError, match="transformers cannot read it by AutoModel"):
        load_by_transformers("AutoModel", bert)


def test_rows_of_a_file_of_data_name_no_other_file(here: Path):
    Path("data").mkdir()
    Path("private.png").write_bytes(b"\x89PNG private")
    for path in ("../private.png", str(here / "private.png")):
        parquet.write_table(pa.table({"image": [{"bytes": None, "path": path}]}), "data/a.parquet")
        Path("data/a.jsonl").write_text(json.dumps({"image": path}))
        for name in ("a.parquet", "a.jsonl"):
            with pytest.raises(InputError, match="image") as refused:
                list(read(DataConfig(), ("image", "height", "width"), f"data/{name}"))
            assert "PNG private" not in str(refused.value)


class Redirecting(BaseHTTPRequestHandler):
    """Has a row with an address, and sends a client elsewhere that asks for another path."""

    asked: ClassVar[list[str]] = []

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        moved = {"/moved.jsonl": "/a.jsonl", "/file.jsonl": "file:///etc/passwd"}.get(self.path)
        body = json.dumps({"text": f"http://127.0.0.1:{self.server.server_port}/named"}).encode()
        self.send_response(302 if moved else 200)
        self.send_header(*(("Location", moved) if moved else ("Content-Length", str(len(body)))))
        self.end_headers()
        self.wfile.write(b"" if moved else body)

    def do_HEAD(self) -> None:
        self.do_GET()


def test_only_the_server_of_an_address_is_asked():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Redirecting)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    (row,) = open_source(f"{address}/moved.jsonl", "train")
    assert row["text"] == f"{address}/named"
    with pytest.raises(InputError):
        list(open_source(f"{address}/file.jsonl", "train"))
    assert {*Redirecting.asked} == {"/moved.jsonl", "/a.jsonl", "/file.jsonl"}
    server.shutdown()
    server.server_close()


def test_choices_change_no_result(here: Path, monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(1, 2, 1024, 16)
    results = []
    for price in (0.0, 1e9):
        store.save(here / "pin.json", {"rows, 1 thread": {"own": price, "grouped": price}})
        monkeypatch.setenv(store.PIN, str(here / "pin.json"))
        forget()
        results.append(polyformer.attend(x, x, x, pattern="Window(64)"))
    forget()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('pathlib').Path('marker').touch()",
        "Window(open('marker', 'w').write('x'))",
        "[open('marker', 'w') for _ in (1,)]",
        "Window((lambda: open('marker', 'w'))())",
        "Window(f\"{open('marker', 'w')}\")",
    ],
)
def test_expressions_are_not_evaluated(here: Path, text: str):
    for read_ in (Pattern.from_text, lambda text: create_model("decoder-tiny", attention=text)):
        with pytest.raises(InputError):
            read_(text)
    assert not Path("marker").exists()


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.mkfifo [marker]", "a: !own 1", "a: &x [1]\nb: *x", "<<: {a: 1}\n!!int 1"],
)
def test_yaml_has_neither_tags_nor_aliases(here: Path, text: str):
    with pytest.raises(InputError):
        parse_yaml(text, "it")
    assert not Path("marker").exists()


@pytest.mark.parametrize(
    "ask",
    [
        lambda: GenerationConfig(max_new_tokens=10**12),
        lambda: model_config("gpt2", {"vocab_size": 10**12}),
        lambda: create_model("decoder-tiny", hidden_size=10**12),
        lambda: Pattern.from_text("Window(1000000000000)"),
    ],
)
def test_a_size_is_checked_before_memory_is_allocated(ask: Callable[[], object]):
    tracemalloc.start()
    with pytest.raises(InputError):
        ask()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_the_patience_with_servers():
    assert (remote.PATIENCE, remote.SLOWEST) == (60, 2**10)
