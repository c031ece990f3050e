"""Two processes with half of a model's layers each compute what one does. Real processes, gloo on the CPU."""

import copy
import gc
import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import polyformer
from launching import torchrun
from polyformer.training.distributed.fully_sharded import apply_fsdp, unsharded
from polyformer.training.distributed.pipeline import CACHED_SCHEDULES, Pipeline

SMALL: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "dropout": 0.0,
}
Batch = dict[str, Tensor]

SHARDED = "decoder", "untied", "experts with a loss of their own", "encoder-decoder"
"""The cases that are run again with half of all parameters in each process."""


def decoder(**changes: Any) -> Any:
    return polyformer.create_model("gpt2", **{**SMALL, "num_hidden_layers": 4, **changes}).double()


def encoder(**changes: Any) -> Any:
    return polyformer.create_model("bert-base", **{**SMALL, "num_hidden_layers": 3, **changes}).double()


def packed(rows: int, length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 23, (rows, length), generator=generator)
    documents = (torch.arange(length) >= length // 3).long().expand(rows, -1)
    return {"input_ids": ids, "labels": ids.clone(), "document_ids": documents.contiguous()}


def translator(**changes: Any) -> Any:
    sizes = {**SMALL, "vocab_size": 23, "encoder.num_hidden_layers": 3, "decoder.num_hidden_layers": 2}
    return polyformer.create_model("transformer-base", **{**sizes, **changes}).double()


def pairs(rows: int, length: int, seed: int) -> Batch:
    """A source, and a target that is two tokens longer, some of it padding."""
    target = masked(rows, length + 2, seed + 9)
    labels = target["input_ids"].masked_fill(target["attention_mask"] == 0, -100)
    return {**masked(rows, length, seed), "labels": labels}


def masked(rows: int, length: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 23, (rows, length), generator=generator)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)).long()
    labels = torch.where((torch.rand(rows, length, generator=generator) < 0.4) & (mask == 1), ids, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def cases() -> dict[str, tuple[Any, list[Batch], Any, int]]:
    """Models, batches (rows and lengths differ), schedule and stages a process."""
    rows = [packed(2, 9, 0), packed(3, 7, 1), packed(3, 9, 2), packed(1, 5, 3)]
    texts = [masked(2, 9, 0), masked(3, 7, 1), masked(3, 9, 2), masked(1, 5, 3)]
    sources = [pairs(2, 9, 0), pairs(3, 7, 1), pairs(3, 9, 2), pairs(1, 5, 3)]
    window = {"attention": "Window(3)", "position": "rope"}
    return {
        "decoder": (decoder(), rows, "1f1b", 1),
        "decoder, GPipe, one microbatch": (decoder(), rows[:1], "gpipe", 1),
        "windows and RoPE, interleaved": (decoder(**window), rows, "1f1b", 2),
        "T5's bias, shared by all layers": (decoder(position="t5"), rows, "1f1b", 1),
        "untied": (decoder(tied=False), rows, "gpipe", 1),
        "encoder, odd layers": (encoder(), texts, "1f1b", 1),
        "experts with a loss of their own": (decoder(feedforward="experts"), rows, "1f1b", 1),
        "encoder-decoder": (translator(), sources, "1f1b", 1),
        "encoder-decoder, interleaved": (translator(), sources, "1f1b", 2),
        "all layers the same weights": (encoder(num_hidden_groups=1), texts, "gpipe", 1),
    }


def one_process(model: Any, batches: list[Batch], shares: list[float]) -> list[float]:
    losses = []
    for batch, share in zip(batches, shares):
        output = model(**batch)
        (output.loss * share).backward()
        losses.append(output.loss.item())
    return losses


def compare(name: str, model: Any, batches: list[Batch], schedule: Any, per_process: int) -> None:
    model.train()
    whole, shares = copy.deepcopy(model), [0.1, 0.2, 0.3, 0.4][: len(batches)]
    expected = one_process(whole, batches, shares)
    pipeline = Pipeline(model, dist.group.WORLD, schedule, per_process)  # type: ignore[arg-type]
    losses = pipeline.step(batches, shares)
    assert losses == pytest.approx(expected, rel=0, abs=1e-10), name
    gradients = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    mine = dict(model.named_parameters())
    assert (
        0 < sum(p.numel() for p in mine.values()) < sum(p.numel() for p in whole.parameters())
        or "same" in name
    )
    for parameter_name, parameter in mine.items():
        if parameter_name in gradients:
            torch.testing.assert_close(
                parameter.grad, gradients[parameter_name], rtol=0, atol=1e-10, msg=f"{name}: {parameter_name}"
            )
    norm = torch.stack([gradient.pow(2).sum() for gradient in gradients.values()]).sum().sqrt()
    torch.testing.assert_close(pipeline.norm(), norm)
    model.eval()
    whole.eval()
    for batch in batches[:2]:
        output, other = pipeline.evaluate(batch), whole(**batch)
        torch.testing.assert_close(output.loss, other.loss, rtol=0, atol=1e-10)
        torch.testing.assert_close(output.last_hidden_state, other.last_hidden_state, rtol=0, atol=1e-10)
        torch.testing.assert_close(output.logits, other.logits, rtol=0, atol=1e-10)
    pipeline.owners.restore_modules()
    collected = {n: pipeline.owners.fetch(value) for n, value in model.state_dict(keep_vars=True).items()}
    if dist.get_rank() == 0:
        assert collected.keys() == whole.state_dict().keys()
        for parameter_name, value in whole.state_dict().items():
            assert torch.equal(collected[parameter_name], value), f"{name}: {parameter_name}"


def compare_sharded(name: str, model: Any, batches: list[Batch], schedule: Any, per_process: int) -> None:
    """One stage, whose parameters both processes have a half of, with batches of their own."""
    assert per_process == 1
    rank, whole, shares = dist.get_rank(), copy.deepcopy(model), [0.1, 0.2, 0.3, 0.4]
    expected = one_process(whole, batches, shares)
    alone = dist.new_group([rank], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2,))
    assert alone is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline = Pipeline(model, alone, schedule, divide=lambda root: apply_fsdp(model, mesh, root))  # type: ignore[arg-type]
        for _ in range(2):  # gradients are added to those that are there
            losses = pipeline.step(batches[rank::2], [2 * share for share in shares[rank::2]])
    assert losses == pytest.approx(expected[rank::2], rel=0, abs=1e-10), name
    gradients = {n: 2 * p.grad for n, p in whole.named_parameters() if p.grad is not None}
    for parameter_name, parameter in model.named_parameters():
        assert parameter.to_local().numel() < parameter.numel()
        if parameter_name in gradients:
            gradient = parameter.grad.full_tensor()
            torch.testing.assert_close(gradient, gradients[parameter_name], rtol=0, atol=1e-10, msg=name)
    norm = torch.stack([gradient.pow(2).sum() for gradient in gradients.values()]).sum().sqrt()
    torch.testing.assert_close(pipeline.norm(), norm)
    model.eval()
    with unsharded(pipeline.root):
        logits = pipeline.evaluate(batches[0]).logits
    torch.testing.assert_close(logits, whole.eval()(**batches[0]).logits, rtol=0, atol=1e-10)


def many_shapes() -> None:
    """Texts of many lengths leave the buffers of a few behind."""
    pipeline = Pipeline(decoder(), dist.group.WORLD)  # type: ignore[arg-type]
    schedules = []
    for length in (5, 6, 7, 5, 8, 9, 10, 5):
        pipeline.step([packed(2, length, 0)] * 2, [0.5, 0.5])
        schedules.append(weakref.ref(next(reversed(pipeline.schedules.values()))))
    gc.collect()
    assert len({id(there) for schedule in schedules if (there := schedule()) is not None}) == CACHED_SCHEDULES
    assert schedules[0]() is schedules[-1]()


def both_processes(out: Path) -> None:
    """What each of the two runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, case in cases().items():
        compare(name, *case)
    for name, case in cases().items():
        if name in SHARDED:
            compare_sharded(name, *case)
    many_shapes()
    (out / f"done-{os.environ['RANK']}").write_text("all")
    dist.destroy_process_group()


def test_two_processes_are_one(tmp_path: Path) -> None:
    ended = torchrun(__file__, tmp_path, timeout=180)
    assert ended.returncode == 0, ended.stderr[-5000:]
    assert {path.name for path in tmp_path.iterdir()} == {"done-0", "done-1"}


if __name__ == "__main__":
    torch.manual_seed(0)
    both_processes(Path(sys.argv[1]))
