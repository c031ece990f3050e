"""What a run costs: floating-point operations of its training, and the peak of its memory.

training_flops      of all forward and backward passes, a product and its sum counted as two: the mean of the
                    first batches times the batches of the run, as torch counts matrix products and attention
peak_resident_mib   on a CPU: the largest resident set of the process during the training in MiB, with Python
                    and its libraries; runs one after the other in one process add what they leave behind
peak_allocated_mib  on CUDA: the largest sum of tensors that torch has allocated during the training, in MiB

The peak memory of one call is measured by the allocator on CUDA, in a fresh process on a CPU.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from polyformer.core.errors import InputError
from polyformer.core.files import read_json, write_json
from polyformer.core.host_values import batch_to_device
from polyformer.core.measuring import MIB, peak_memory, reset_peak_memory
from polyformer.core.ops.product_kernels import counted_flops
from polyformer.models.plugins import IMPORTED_NAMES, import_all
from polyformer.training.machine import choose_device
from polyformer.training.recipes import Recipe, Run, fit
from polyformer.training.recipes.fit import Fitted
from polyformer.training.tasks import TaskWithData
from polyformer_lab.bench.rows import AbsentError

FLOPS, RESIDENT, ALLOCATED = COSTS = ("training_flops", "peak_resident_mib", "peak_allocated_mib")

PEAK = "peak_memory.json"
"""The file in the folder of a run with the peak of its training by name."""

BATCHES = 3
"""The batches whose operations are counted."""


def fitted_with_peak(recipe: Recipe, folder: Path, resume: bool) -> Fitted:
    """Return the run of `fit`; its folder gets the peak of its memory if it trains now."""
    trains = not (resume and Run.open(folder).finished)
    on_cuda = choose_device(recipe.training.engine.device).type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError, ImportError):  # elsewhere the peak of the whole process
        reset_peak_memory()
    fitted = fit(recipe, folder, resume=resume)
    if trains:
        with contextlib.suppress(ImportError):  # Windows does not count it
            peak = torch.cuda.max_memory_allocated() if on_cuda else peak_memory()
            write_json(folder / PEAK, {ALLOCATED if on_cuda else RESIDENT: round(peak / MIB, 1)})
    return fitted


def costs(fitted: Fitted) -> dict[str, float]:
    """Return the operations and the peak memory of a finished run, as far as they are known."""
    file = fitted.run.folder / PEAK
    peaks = read_json(file, dict) if file.is_file() else {}
    return {FLOPS: training_flops(fitted), **{name: peaks[name] for name in COSTS if name in peaks}}


def training_flops(fitted: Fitted) -> float:
    """Return the floating-point operations of the training of a finished run.

    The batches are the first of the run, with the final weights; `fitted.model` stays as it is.
    """
    recipe, task = fitted.run.recipe, fitted.task
    module = task.objective.training_module(fitted.model, fitted.run.folder)
    data = TaskWithData(task, fitted.splits, recipe.seed)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(), counted_flops(FUSED_ON_CPU) as counter:
        passes = _backward_passes(module.train(), data)
    module.zero_grad(set_to_none=True)
    for name, buffer in module.named_buffers():  # running means change with each pass
        buffer.copy_(buffers[name])
    module.eval()
    return counter.get_total_flops() / passes * fitted.result.step * recipe.training.accumulate


def _backward_passes(module: nn.Module, data: TaskWithData) -> int:
    """Run forward and backward passes of the first batches; return their number."""
    device = next(module.parameters()).device
    passes, state = 0, None
    for batch in islice(data.batches(0, 0, 0, 1), BATCHES):
        own = batch_to_device(batch, device)
        if data.continues:
            loss, state = data.loss_after(module, own, state)
        else:
            loss = data.loss(module, own)
        loss.backward()
        passes += 1
    return max(passes, 1)


Shape = tuple[int, ...]


def _attention(query: Shape, key: Shape, value: Shape, *others: object, **named: object) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *others: object, **named: object
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


FUSED_ON_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Attention of CPUs, which torch's counter leaves out."""


Given = TypeVar("Given")


def peak_mib(make: Callable[[Given], Callable[[], object]], inputs: Given, warm: Given, device: str) -> float:
    """Return the MiB that the call `make(inputs)()` requires in addition to its inputs.

    `make` is a function of a module and `inputs` is plain data: on a CPU a separate process makes the call,
    so that earlier measurements do not count. It first runs the smaller call `warm`, which loads the
    libraries; without `warm`, the memory of loading counts too.

    Raises `MemoryError` if the call requires more memory than available.
    """
    if torch.device(device).type == "cuda":
        return _on_cuda(make(inputs))
    own = import_all, (tuple(IMPORTED_NAMES),)
    with ProcessPoolExecutor(1, get_context("spawn"), *own) as pool:
        try:
            return pool.submit(_in_process, make, inputs, warm, torch.get_num_threads()).result()
        except BrokenProcessPool:  # the system has ended it
            raise MemoryError("it needs more memory than there is") from None


def _on_cuda(call: Callable[[], object]) -> float:
    call()  # compiled and tuned first
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def _in_process(
    make: Callable[[Given], Callable[[], object]], inputs: Given, warm: Given, threads: int
) -> float:
    torch.set_num_threads(threads)
    with contextlib.suppress(AbsentError, InputError):
        make(warm)()
    call = make(inputs)
    before = reset_peak_memory()
    call()
    return (peak_memory() - before) / MIB
