"""Two builds into one collection, by real processes and a server of their own: one of them builds."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_stores import TEXT, lines, manifest

from forking import processes
from polyformer.applications.retrieval import build as building
from polyformer.applications.retrieval import milvus_lease, milvus_server
from polyformer.applications.retrieval.milvus_lease import Lease
from polyformer.applications.retrieval.milvus_server import Address, Server
from polyformer.applications.retrieval.milvus_store import build_in_milvus, open_in_milvus
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
    milvus_lease.BEAT, milvus_lease.LEASE, milvus_lease.PAUSE = 0.1, 4.0, 0.2
    milvus_server.CONNECT = 60.0

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
    assert not Server(address).leases()


def test_a_killed_builder_holds_it_no_longer(address: Address, checkpoint: Path, text: Path):
    first, _, _ = begin(checkpoint, text, address, waits=True)
    first.kill()
    first.join()
    assert len(Server(address).leases()) == 1
    start = time.monotonic()
    _, said, _ = begin(checkpoint, text, address)
    assert isinstance(last(said), int)
    assert time.monotonic() - start > 4.0  # it might have been alive


def test_a_builder_that_was_away_too_long_counts_nothing_more(address: Address, checkpoint: Path, text: Path):
    first, first_said, first_goes_on = begin(checkpoint, text, address, waits=True)
    os.kill(first.pid, signal.SIGSTOP)
    _, second_said, second_goes_on = begin(checkpoint, text, address, waits=True)
    os.kill(first.pid, signal.SIGCONT)
    first_goes_on.set()
    assert "another process builds it" in last(first_said)
    second_goes_on.set()
    assert isinstance(last(second_said), int)


class Suspended(Server):
    """The server of a builder that is suspended for two leases while it writes a heartbeat."""

    lease: Lease

    def write(self, row: int, content: dict[str, Any]) -> None:
        if content["beat"]:
            self.remove(row)  # as another builder does
            self.lease.sure_from -= 2 * milvus_lease.LEASE
        super().write(row, content)


def test_a_heartbeat_that_restores_a_removed_row_is_taken_back(
    address: Address, checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(milvus_lease, "BEAT", 0.05)
    server = Suspended(address)
    server.create_about()
    server.lease = lease = Lease(server, manifest(open_reader(checkpoint, "cpu"), text))
    lease.acquire()
    thread = threading.Thread(target=lease.beat, daemon=True)
    thread.start()
    thread.join(60)
    lease.ended.set()
    assert not thread.is_alive()  # the heartbeat came too late
    assert not server.leases()
    with pytest.raises(InputError, match="another process builds it"):
        lease.check()
    server.write(lease.row, lease.about | {"beat": 0})
    with pytest.raises(InputError, match="another process builds it"):  # although the row is there
        lease.check()


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


def test_two_at_the_same_moment_are_not_both_let_in(address: Address, checkpoint: Path, text: Path):
    """Each adds its row before it looks: the one that looks last sees the other."""
    reader, server = open_reader(checkpoint, "cpu"), Server(address)
    server.create_about()
    leases = [Lease(server, manifest(reader, text)) for _ in range(2)]
    for row, lease in enumerate(leases):
        lease.row = -100 - row
        server.write(lease.row, lease.about)
    assert all(lease._others() for lease in leases)
    leases[0].release()
    assert not leases[1]._others()
    leases[1].check()
    with pytest.raises(InputError, match="another process builds it"):
        leases[0].check()
