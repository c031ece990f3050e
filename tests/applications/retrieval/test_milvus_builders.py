"""Two builds into one collection, by real processes and a server of their own: one of them builds."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stores import TEXT, lines, manifest

from forking import processes
from polyformer.applications.retrieval import milvus
from polyformer.applications.retrieval import store as building
from polyformer.applications.retrieval.milvus import Address, Server, build_in_milvus, open_in_milvus
from polyformer.applications.retrieval.readers import open_reader
from polyformer.applications.retrieval.store import open_folder
from polyformer.core.errors import InputError

pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")
pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries' own

Start = Callable[[], object]


def builds(checkpoint: Path, text: Path, address: Address, part: int, said: Any, go_on: Any) -> None:
    """Builds; after the first batch says "begun" and waits until it may go on; says how it ended."""
    torch.set_num_threads(1)
    building.COMMIT_SECONDS = 0.0
    building.BATCH_TOKENS = 256
    milvus.CONNECT = 60.0

    def report(progress: object) -> None:
        said.put("begun")
        go_on.wait(60)

    reader = open_reader(checkpoint, "cpu")
    try:
        said.put(build_in_milvus(reader, lines(text), manifest(reader, text, part, 2), address, report))
    except InputError as error:
        said.put(str(error))


STARTED: list[Any] = []


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Also where a test fails."""
    yield
    while STARTED:
        process, *_ = STARTED.pop()
        process.kill()
        process.join()


def begin(checkpoint: Path, text: Path, address: Address, part: int = 1, waits: bool = False) -> Any:
    """Such a process, what it says, and the event that lets it go on."""
    said, go_on = processes.Queue(), processes.Event()
    if not waits:
        go_on.set()
    process = processes.Process(target=builds, args=(checkpoint, text, address, part, said, go_on))
    process.start()
    STARTED.append((process, said, go_on))  # which would end with the last reference
    if waits:
        assert said.get(timeout=60) == "begun"
    return process, said, go_on


def last(said: Any) -> Any:
    """How a build ended: its entries, or its complaint."""
    while (word := said.get(timeout=60)) == "begun":
        pass
    return word


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the cache folder of who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def address(server: Start, server_uri: str) -> Address:
    server()
    return Address(server_uri, "bottles")


def test_the_second_is_refused_and_the_first_goes_on(
    address: Address, checkpoint: Path, text: Path, store: Path
):
    first, first_said, go_on = begin(checkpoint, text, address, waits=True)
    _, refused, _ = begin(checkpoint, text, address)
    _, beside, _ = begin(checkpoint, text, address, part=2)  # another part of the same build
    assert f"in use by process {first.pid} on" in last(refused)
    entries = last(beside)
    go_on.set()
    entries += last(first_said)
    first.join()
    assert entries == open_in_milvus(address).manifest.count == open_folder(store).manifest.count


def test_a_killed_builder_holds_it_no_longer(address: Address, checkpoint: Path, text: Path, store: Path):
    first, _, _ = begin(checkpoint, text, address, waits=True)
    first.kill()
    first.join()
    _, said, _ = begin(checkpoint, text, address)
    _, beside, _ = begin(checkpoint, text, address, part=2)
    assert last(said) + last(beside) == open_folder(store).manifest.count


def test_of_two_different_texts_at_once_one_is_built(
    address: Address, checkpoint: Path, text: Path, tmp_path: Path
):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[:900].replace("green", "brown"))
    ends = [last(said) for _, said, _ in [begin(checkpoint, source, address) for source in (text, other)]]
    assert sorted(isinstance(end, int) for end in ends) == [False, True]
    refusal = next(end for end in ends if isinstance(end, str))
    assert "in use by process" in refusal or "other input" in refusal
    entries = next(end for end in ends if isinstance(end, int))
    progress = Server(address).rows()[1]
    assert (progress["entries"], progress["finished"]) == (entries, True)


def test_two_processes_on_one_embedded_file(checkpoint: Path, text: Path, tmp_path: Path):
    """The embedded server lets one process in at a time, by a lock of the kernel."""
    address = Address(str(tmp_path / "lite.db"), "bottles")
    begin(checkpoint, text, address, waits=True)
    _, said, _ = begin(checkpoint, text, address)
    assert "in use by another process" in last(said)
