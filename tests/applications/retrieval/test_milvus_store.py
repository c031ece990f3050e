"""The same commands with a Milvus URI: an embedded server, and one that is a process of its own and dies."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_stores import READING, TEXT, lines, manifest, tiny_checkpoint

from polyformer.applications.retrieval import milvus, open_store
from polyformer.applications.retrieval import store as building
from polyformer.applications.retrieval.milvus import (
    Address,
    MilvusWriter,
    build_in_milvus,
    entry_numbers,
    open_in_milvus,
)
from polyformer.applications.retrieval.readers import open_reader, windows
from polyformer.applications.retrieval.store import MixtureConfig, open_folder
from polyformer.cli.main import main
from polyformer.core.errors import InputError

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries' own


def same_answers(address: Address, store: Path, share: float = 1.0) -> None:
    """A search in the collection finds what a search in the folder finds."""
    queries = torch.from_numpy(open_folder(store).keys[::97].astype("f4")) + 0.05
    there, here = open_in_milvus(address, "flat").search(queries, 9), open_folder(store).search(queries, 9)
    close = torch.isclose(there.distances, here.distances, rtol=1e-3, atol=1e-3)
    assert close.float().mean() >= share
    assert (there.values == here.values).float().mean() > 0.95  # of equal distances either comes first


@pytest.fixture(scope="module")
def embedded(checkpoint: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Address:
    """The text's store in an embedded server, built in two parts."""
    address = Address.of(f"{tmp_path_factory.mktemp('milvus')}/lite.db/bottles")
    assert address is not None
    reader = open_reader(checkpoint, "cpu")
    for part in (2, 1):
        build_in_milvus(reader, lines(text), manifest(reader, text, part, 2), address, lambda progress: None)
    return address


@pytest.mark.parametrize(
    ("name", "uri", "collection"),
    [
        ("http://host:19530", "http://host:19530", "polyformer"),
        ("https://host/texts", "https://host", "texts"),
        ("stores/a.db", "stores/a.db", "polyformer"),
        ("stores/a.db/texts", "stores/a.db", "texts"),
        ("stores/a", None, None),
    ],
)
def test_names_of_stores(name: str, uri: str | None, collection: str | None):
    address = Address.of(name)
    assert (uri, collection) == (None, None) if address is None else address == Address(uri, collection)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["my-store", "bottles/deeper", "collections/bottles", "collections"])
def test_no_folder_lies_in_an_embedded_database(
    name: str, embedded: Address, checkpoint: Path, text: Path, complaint: Callable[..., str]
):
    before = sorted(Path(embedded.uri).rglob("*"))
    if name != "collections":
        error = complaint("datastore", "build", checkpoint, text, "--out", f"{embedded.uri}/{name}")
        assert f"in the folder of the Milvus database {embedded.uri}; expected its collection" in error
    else:
        assert Address.of(f"{embedded.uri}/{name}") == Address(embedded.uri, name)
    assert sorted(Path(embedded.uri).rglob("*")) == before


@pytest.mark.parametrize("name", ["http://host/my-store", "ftp://host/x", "milvus://host/x"])
def test_other_addresses_are_no_folders(
    name: str, checkpoint: Path, text: Path, complaint: Callable[..., str]
):
    assert "expected http://HOST:19530/NAME" in complaint(
        "datastore", "build", checkpoint, text, "--out", name
    )


@pytest.mark.parametrize(
    ("version", "half"), [("v2.3.5-lite", False), ("v2.4.0", True), ("3.0", True), ("1.9", False), ("", True)]
)
def test_half_precision_where_the_server_indexes_it(version: str, half: bool):
    """Server 2.3 takes half-precision vectors, and then its index is never finished."""

    class Answers:
        def call(self, name: str) -> str:
            assert name == "get_server_version"
            return version

    assert milvus.indexes_half(Answers()) is half  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [1, 3])
def test_entries_are_numbered_as_the_text_is(parts: int, checkpoint: Path, text: Path):
    reader, numbers = open_reader(checkpoint, "cpu"), []
    for part in range(1, parts + 1):
        described, first = manifest(reader, text, part, parts), 0
        for window in windows(reader.documents(lines(text)), READING):
            if window.number % parts == part - 1:
                numbers += entry_numbers(described, first, window.entries).tolist()
                first += window.entries
    assert sorted(numbers) == list(range(len(numbers)))


def test_a_collection_finds_what_a_folder_finds(embedded: Address, store: Path, checkpoint: Path):
    same_answers(embedded, store)
    opened = open_store(str(embedded), open_reader(checkpoint, "cpu").fingerprints)
    assert opened.manifest.count == open_folder(store).manifest.count


def test_commands_take_its_name(
    embedded: Address, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    held = tmp_path / "held.txt"
    held.write_text(TEXT[200:600])
    words = "evaluate", checkpoint, "--datastore", embedded, "--tune", held, "--neighbours", 8
    assert main([*map(str, words)]) == 0
    options = ["--prompt", TEXT[:30], "--max-new-tokens", "4"]
    assert main(["generate", str(checkpoint), "--datastore", str(embedded), *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(TEXT[:30])
    assert isinstance(open_in_milvus(embedded).mixture(), MixtureConfig)
    assert main(["datastore", "merge", str(embedded)]) == 2
    again = "datastore", "build", checkpoint, text, "--out", embedded, "--length", 32, "--context", 8
    assert main([*map(str, again), "--part", "1", "--parts", "2"]) == 0  # it is finished, and stays so


def test_an_index_finds_nearly_all(embedded: Address, store: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["datastore", "index", str(embedded), "--lists", "16"]) == 0
    opened = open_in_milvus(embedded, "index")
    assert opened.probes is not None
    assert opened.probes <= 16
    same_answers(embedded, store, 0.95)  # the embedded server makes 128 lists, however many are asked for


def test_another_model_and_another_text(
    embedded: Address, text: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = tiny_checkpoint(tmp_path / "model", seed=1)
    with pytest.raises(InputError, match="another model"):
        open_store(str(embedded), open_reader(other, "cpu").fingerprints)
    assert main(["datastore", "build", str(other), str(text), "--out", str(embedded)]) == 2
    assert "started with other input" in capsys.readouterr().err
    with pytest.raises(InputError, match="no such datastore"):
        open_in_milvus(Address(embedded.uri, "nothing"))


def test_a_server_that_dies_in_the_middle(
    server: Callable[[], subprocess.Popen[bytes]],
    server_uri: str,
    checkpoint: Path,
    text: Path,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(milvus, "TIMEOUT", 3.0)
    monkeypatch.setattr(milvus, "CONNECT", 2.0)
    monkeypatch.setattr(milvus, "SENT_BYTES", 1000)
    monkeypatch.setattr(building, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(building, "BATCH_TOKENS", 256)
    address = Address(server_uri, "bottles")
    process, reader = server(), open_reader(checkpoint, "cpu")
    with monkeypatch.context() as patient:
        patient.setattr(milvus, "CONNECT", 60.0)
        milvus.Server(address)
    plain, calls = MilvusWriter.add, []

    def dying(writer: MilvusWriter, *arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 4:
            process.kill()
            process.wait()
        plain(writer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MilvusWriter, "add", dying)
    described = manifest(reader, text)
    with pytest.raises(InputError, match="the Milvus server failed"):
        build_in_milvus(reader, lines(text), described, address, lambda progress: None)
    with pytest.raises(InputError, match="the Milvus server failed"):
        open_in_milvus(address)
    again = server()
    monkeypatch.setattr(milvus, "TIMEOUT", 60.0)
    monkeypatch.setattr(milvus, "CONNECT", 60.0)
    with pytest.raises(InputError, match="not finished"):
        open_in_milvus(address)
    before = len(calls)
    build_in_milvus(reader, lines(text), described, address, lambda progress: None)
    batches = -(-len(open_folder(store).values) // (READING.fresh * 256 // READING.length))
    assert len(calls) - before == batches - 3  # the three that were confirmed are not read again
    assert open_in_milvus(address).manifest.count == open_folder(store).manifest.count
    same_answers(address, store)
    again.kill()


def test_without_pymilvus_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(InputError, match=r"pip install 'polyformer\[datastore\]'"):
        open_in_milvus(Address("http://127.0.0.1:1", "none"))
