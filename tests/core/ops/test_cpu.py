"""Work on several threads, in order and each alone; and memory in huge pages, which keeps its contents."""

import os
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import nn

import polyformer
from attention_cases import LargestTensor
from polyformer.core.ops import cpu as cpu_threads
from polyformer.core.ops.cpu import PAGE, parallel_map, suitable_threads, use_huge_pages


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_tiny_models_are_trained_by_one_thread() -> None:
    """What counts is the largest matrix of a layer, not vectors or tables of tokens."""
    assert suitable_threads(polyformer.create_model("decoder-tiny", vocab_size=8192)) == 1
    assert suitable_threads(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(1 << 20))) == 1
    assert suitable_threads(nn.Linear(256, 257)) == 4
    assert suitable_threads(nn.Identity()) == 1


def test_groups_are_consecutive_and_in_order() -> None:
    assert parallel_map(list, range(10)) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    assert parallel_map(list, range(3)) == [[0], [1], [2]]
    assert parallel_map(list, [5]) == [[5]]
    assert parallel_map(list, []) == [[]]
    assert parallel_map(list, range(3), torch.device("cuda")) == [[0, 1, 2]]


def test_each_thread_computes_alone_and_the_others_as_before() -> None:
    def threads(group: Sequence[int]) -> tuple[int, bool]:
        return torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    assert parallel_map(threads, range(4)) == [(1, False)] * 4
    assert parallel_map(threads, range(2)) == [(2, False)] * 2
    assert torch.get_num_threads() == 4
    fresh: list[int] = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [4], "threads that start later are as they would have been"


def test_one_thread_needs_no_other() -> None:
    torch.set_num_threads(1)
    assert parallel_map(lambda group: threading.current_thread() is threading.main_thread(), range(4)) == [
        True
    ]


def test_modes_are_those_of_the_caller() -> None:
    def modes(group: Sequence[int]) -> tuple[bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    assert parallel_map(modes, range(2)) == [(False, False)] * 2
    with torch.inference_mode():
        assert parallel_map(modes, range(2)) == [(True, False)] * 2


def test_who_watches_operations_sees_them_all() -> None:
    with LargestTensor() as seen:
        parallel_map(lambda group: torch.zeros(1000), range(4))
    assert seen.largest == 1000


def test_errors_come_back() -> None:
    def fails(group: Sequence[int]) -> None:
        raise KeyError(group[0])

    with pytest.raises(KeyError):
        parallel_map(fails, range(4))
    assert parallel_map(len, range(4)) == [1] * 4, "and the workers live on"


def test_a_forked_process_makes_workers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = cpu_threads._pool(os.getpid(), 4, 4)
    assert cpu_threads._pool(os.getpid(), 4, 4) is pool
    monkeypatch.setattr(cpu_threads.os, "getpid", lambda: -1)
    assert parallel_map(len, range(4)) == [1] * 4
    assert cpu_threads._pool(-1, 4, 4) is not pool


def test_contents_stay():
    x = torch.randn(3 * PAGE // 4 + 5)
    before = x.clone()
    use_huge_pages(x.data_ptr(), x.nbytes)
    assert torch.equal(x, before)
    x.add_(1)
    assert torch.equal(x, before + 1)


def test_what_is_too_small_or_not_there_is_left_alone():
    x = torch.randn(7)
    use_huge_pages(x.data_ptr(), x.nbytes)
    use_huge_pages(PAGE, 4 * PAGE)  # no memory lies there, which the system says
