"""Tokens a second of one process, and of two that share the work, each with one thread: scaling efficiency.

`python tests/training/distributed/measured_speed.py` prints a table. Every mesh takes the same texts a step.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from measured_steps import divide
from torch import nn

from polyformer.core.sequence.context_parallel import context_parallel
from polyformer.models.presets import create_model
from polyformer.training.config import ParallelConfig
from polyformer.training.distributed.fully_sharded import split_groups_by_mesh
from polyformer.training.distributed.pipeline import Pipeline
from polyformer.training.distributed.tensor_parallel import apply_tensor_parallel
from polyformer.training.machine import open_mesh
from polyformer.training.optimizers import AdamW

sys.path.insert(0, str(Path(__file__).parents[2]))
from launching import run_checks

LENGTH, STEPS, MICROBATCHES = 256, 7, 4
TEXTS = 8, 16
MESHES = "alone", "data", "shard", "tensor", "context", "pipeline"


def model() -> nn.Module:
    """5.2 million weights: four layers of width 256."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_hidden_layers": 4, "intermediate_size": 1024}
    return create_model("gpt2", vocab_size=4096, max_position_embeddings=LENGTH, **sizes).train()


@contextmanager
def stepping(name: str, texts: int) -> Iterator[Callable[[], object]]:
    """A function that does one step of training, of `texts` texts over all processes."""
    whole = model()
    own = texts // 2 if name in ("data", "shard") else texts
    ids = torch.randint(3, 4096, (own, LENGTH))
    if name == "alone":
        optimizer = AdamW().build(whole)
        yield lambda: update(optimizer, lambda: whole(input_ids=ids, labels=ids).loss.backward())
        return
    mesh = open_mesh(ParallelConfig.from_dict({name: 2}), "cpu")
    if name == "pipeline":
        pipeline = Pipeline(whole, mesh.group("pipeline"))
        parts = [{"input_ids": part, "labels": part} for part in ids.chunk(MICROBATCHES)]
        optimizer = AdamW().build(whole)
        yield lambda: update(optimizer, lambda: pipeline.step(parts, MICROBATCHES * [1 / MICROBATCHES]))
        return
    if name == "tensor":
        apply_tensor_parallel(whole, mesh.device_mesh["tensor"])
    runs = divide(whole, mesh, whole)
    optimizer = AdamW().build(whole)
    split_groups_by_mesh(optimizer)
    with context_parallel(mesh.group("context")) if name == "context" else nullcontext():
        yield lambda: update(optimizer, lambda: runs(input_ids=ids, labels=ids).loss.backward())


def update(optimizer: torch.optim.Optimizer, backward: Callable[[], object]) -> None:
    """Gradients, and a step with them."""
    backward()
    optimizer.step()
    optimizer.zero_grad()


def tokens_a_second(name: str, texts: int) -> tuple[float, float]:
    """By the fastest of some steps, for others may be at work on the machine; and by the processor's time of
    the busiest process, as if nobody ever waited."""
    seconds = []
    with stepping(name, texts) as step:
        for _ in range(STEPS):
            begin = time.perf_counter(), time.process_time()
            step()
            seconds.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    fastest, busy = torch.tensor(seconds).amin(0), torch.tensor(seconds).median(0).values[1:]
    dist.all_reduce(busy, dist.ReduceOp.MAX)
    return texts * LENGTH / float(fastest[0]), texts * LENGTH / float(busy)


def measure() -> None:
    """What each process of a group does; the first one writes what it found."""
    names = MESHES[:1] if dist.get_world_size() == 1 else MESHES[1:]
    speeds = {name: [tokens_a_second(name, texts) for texts in TEXTS] for name in names}
    if dist.get_rank() == 0:
        (Path(os.environ["SPEEDS"]) / f"{dist.get_world_size()}.json").write_text(json.dumps(speeds))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPEEDS"] = folder
        run_checks({1: (measure,), 2: (measure,)})
        rows = {}
        for path in sorted(Path(folder).iterdir()):
            rows |= json.loads(path.read_text())
    print("| two processes | " + " | ".join(f"{texts} texts a step" for texts in TEXTS) + " |")
    print("|---|" + len(TEXTS) * "---|")
    for mesh, speeds in rows.items():
        cells = []
        for own, alone in zip(speeds, rows["alone"]):
            wall, busy = (ours / theirs for ours, theirs in zip(own, alone))
            cells.append(f"{own[0]:,.0f} ({wall:.2f} times; {busy:.2f} by processor time)")
        print(f"| {mesh} | " + " | ".join(cells) + " |")
