"""`polyformer bench neighbours` on a store of a few thousand keys."""

from pathlib import Path

import pytest

from polyformer.bench.neighbours import NeighboursBench, in_milvus, run
from polyformer.core.errors import InputError
from polyformer.datastore.store import open_folder


def test_every_search_is_timed_and_the_index_finds_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("faiss")
    sizes = {"entries": 10_000, "width": 16, "batch": 3, "neighbours": 10, "centres": 50, "rank": 4}
    taken = run(NeighboursBench(**sizes, repeats=1, out=str(tmp_path / "store")))
    assert {"read", "flat", "IVF-PQ", "recall"} <= taken.keys()
    assert min(taken.values()) > 0
    assert taken["recall"] > 0.5
    said = capsys.readouterr().out
    assert "% of the memory's" in said
    assert "ms a query" in said
    with pytest.raises(InputError, match="milvus: expected"):
        in_milvus("somewhere", open_folder(tmp_path / "store"))
