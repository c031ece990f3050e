"""How processes are shared out along the dimensions of a mesh."""

from types import SimpleNamespace

import pytest

from polyformer.core.errors import InputError
from polyformer.training.config import EngineConfig, ParallelConfig
from polyformer.training.distributed.mesh_engine import MeshEngine
from polyformer.training.loop import open_engine


def test_data_is_the_rest_of_the_processes():
    assert ParallelConfig().sizes(6) == {"pipeline": 1, "data": 6, "shard": 1, "context": 1, "tensor": 1}
    sizes = ParallelConfig(shard=2, tensor=3).sizes(12)
    assert list(sizes.items()) == [("pipeline", 1), ("data", 2), ("shard", 2), ("context", 1), ("tensor", 3)]


def test_a_model_that_is_whole_is_trained_by_data_parallelism():
    assert ParallelConfig(data=4).whole
    assert not ParallelConfig(shard=2).whole


@pytest.mark.parametrize(
    ("options", "world", "complaint"),
    [({"data": 3}, "2", "is 3 processes, got 2"), ({"tensor": 2}, "3", "a multiple of 2 processes, got 3")],
)
def test_an_engine_refuses_before_processes_wait_for_one_another(
    options: dict, world: str, complaint: str, monkeypatch: pytest.MonkeyPatch
):
    """No other process answers here: were it to open a group first, this would hang."""
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(InputError, match=complaint):
        open_engine(EngineConfig(parallel=ParallelConfig(**options)))


def test_a_task_that_reads_more_than_a_loss_is_refused_where_texts_are_shared():
    engine = SimpleNamespace(config=EngineConfig(parallel=ParallelConfig(context=2)))
    with pytest.raises(InputError, match="this task reads more of the model than its loss"):
        MeshEngine.check_task(engine, SimpleNamespace())  # type: ignore[arg-type]
