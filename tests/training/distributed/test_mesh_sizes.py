"""How processes are shared out along the dimensions of a mesh."""

from types import SimpleNamespace

import pytest

from polyformer.core.errors import InputError
from polyformer.training.config import EngineConfig, ParallelConfig, TrainingConfig
from polyformer.training.distributed.mesh_engine import MeshEngine
from polyformer.training.loop import open_engine


def test_data_is_the_rest_of_the_processes():
    assert ParallelConfig().sizes(6) == {"pipeline": 1, "data": 6, "shard": 1, "context": 1, "tensor": 1}
    sizes = ParallelConfig(shard=2, tensor=3).sizes(12)
    assert list(sizes.items()) == [("pipeline", 1), ("data", 2), ("shard", 2), ("context", 1), ("tensor", 3)]


def test_what_is_whole_is_plain_data_parallelism():
    assert ParallelConfig(data=4).whole
    assert not ParallelConfig(shard=2).whole


@pytest.mark.parametrize(
    ("options", "world", "complaint"),
    [
        ({"shard": 2, "tensor": 2}, 6, "shard 2 x tensor 2 needs a multiple of 4 processes, got 6"),
        ({"data": 4}, 2, "data 4 x 1 is 4 processes, got 2"),
        ({"data": 1, "shard": 2}, 4, "data 1 x shard 2 is 2 processes, got 4"),
    ],
)
def test_a_product_that_is_not_the_number_of_processes_is_refused(options: dict, world: int, complaint: str):
    with pytest.raises(InputError, match=complaint):
        ParallelConfig(**options).sizes(world)


def test_no_process_along_a_dimension_is_refused():
    with pytest.raises(InputError, match="shard: expected 1 or more, got 0"):
        ParallelConfig(shard=0)


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


@pytest.mark.parametrize(
    ("options", "accumulate", "complaint"),
    [
        ({"pipeline": 4}, 2, "the schedule '1f1b' needs as many microbatches as stages, 4, got 2"),
        ({"pipeline": 2, "stages": 2}, 5, "run microbatches in 2 equal rounds, got 5; use a multiple of 2"),
    ],
)
def test_microbatches_that_a_schedule_cannot_run_are_refused(options: dict, accumulate: int, complaint: str):
    engine = EngineConfig(parallel=ParallelConfig(**options))
    with pytest.raises(InputError, match=complaint):
        TrainingConfig(engine=engine, accumulate=accumulate)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stages": 2}, "stages: expected 1, or more in a pipeline"),
        (
            {"pipeline": 2, "context": 2},
            "pipeline: not together with context yet, got pipeline 2 x context 2",
        ),
    ],
)
def test_what_a_pipeline_does_not_go_with_is_refused(options: dict, complaint: str):
    with pytest.raises(InputError, match=complaint):
        ParallelConfig(**options)
