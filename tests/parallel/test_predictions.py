"""Predicted memory and traffic beside what two processes measure; meshes that do not fit."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyformer.architecture import ModelConfig
from polyformer.cli import main
from polyformer.dot_product.spread.traffic import counted_transfers
from polyformer.parallel.config import ParallelConfig
from polyformer.parallel.mesh import open_mesh
from polyformer.parallel.predict import Prediction, Setting, predict
from polyformer.parallel.predict_trace import kept
from polyformer.parallel.predict_traffic import Keys, exchanged_keys
from polyformer.parallel.shard import local, shard
from polyformer.parallel.tensor import divide_heads
from polyformer.patterns import Full, Window
from polyformer.presets import create_model, model_config
from polyformer.sequence.spread import spread_over
from polyformer.training.recomputing import recomputing

BATCH, LENGTH = 3, 128
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "max_position_embeddings": LENGTH,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("gpt2", SMALL),
    "gated": ("llama-2-7b", {"num_key_value_heads": 2, **SMALL}),
    "windows": ("llama-2-7b", {"num_key_value_heads": 2, **SMALL, "attention": "Window(16)"}),
    "encoder": ("bert-base", SMALL),
}
MESHES = {"data": {"data": 2}, "shard": {"shard": 2}, "tensor": {"tensor": 2}, "context": {"context": 2}}
SENT = {
    "all-gather of weights": "allgather",
    "reduce-scatter of gradients": "reduce_scatter",
    "all-reduce of gradients": "allreduce",
    "all-reduce of activations": "allreduce",
    "keys and values": "keys and values",
    "gradients of keys and values": "gradients of keys and values",
}
CASES = [
    *(("decoder", mesh, half) for mesh in MESHES for half in (False, True)),
    *(("gated", "tensor", False), ("gated", "context", True), ("windows", "context", False)),
    ("encoder", "shard", True),
]


def config_of(name: str) -> ModelConfig:
    """The configuration of one of `MODELS`."""
    preset, options = MODELS[name]
    config = model_config(preset, options)
    assert isinstance(config, ModelConfig)
    return config


class Sent(TorchDispatchMode):
    """Counts the bytes that a process of a ring sends, by the kind of exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].replace("all_reduce", "allreduce")
        kind = next((kind for kind in ("allgather", "reduce_scatter", "allreduce") if kind in name), None)
        if func.namespace in ("c10d", "_c10d_functional") and kind is not None:
            n = dist.get_world_size()
            whole = args[0] if kind != "reduce_scatter" else args[1]
            tensors = [whole] if isinstance(whole, Tensor) else list(whole)
            share = (2 if kind == "allreduce" else 1) * (n - 1) / n
            self.bytes[kind] = self.bytes.get(kind, 0) + share * sum(tensor.nbytes for tensor in tensors)
        return func(*args, **kwargs or {})


def measured(name: str, mesh: str, half: bool) -> dict[str, float]:
    """What a training step of this process holds and sends."""
    preset, options = MODELS[name]
    torch.manual_seed(0)
    model: Any = create_model(preset, **options).train()
    originals = [parameter.data for parameter in model.parameters()]  # so that no memory has their addresses
    own = {tensor.untyped_storage()._cdata for tensor in originals}
    processes = open_mesh(ParallelConfig(**MESHES[mesh]), "cpu")
    if mesh in ("shard", "context"):
        shard(model, processes.sharding)
    elif mesh == "tensor":
        divide_heads(model, processes.device_mesh["tensor"])
        own |= {local(parameter).untyped_storage()._cdata for parameter in model.parameters()}
    wrapped = nn.parallel.DistributedDataParallel(model) if mesh == "data" else model
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 300, (BATCH, LENGTH))
    memories: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        memories[tensor.untyped_storage()._cdata] = tensor
        return tensor

    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    spread = spread_over(processes.group("context")) if mesh == "context" else nullcontext()
    with Sent() as sent, counted_transfers() as transfers, spread:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), autocast:
            loss = wrapped(input_ids=ids, labels=ids).loss
        own |= {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        kept_bytes = sum(x.untyped_storage().nbytes() for key, x in memories.items() if key not in own)
        memories.clear()
        loss.backward()
    for transfer in transfers:
        sent.bytes[transfer.what] = sent.bytes.get(transfer.what, 0) + transfer.sent
    optimizer.step()
    parameters = [*model.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": sum(local(parameter).nbytes for parameter in parameters),
        "gradients": sum(
            local(parameter.grad).nbytes for parameter in parameters if parameter.grad is not None
        ),
        "optimizer": sum(local(value).nbytes for value in states if value.dim()),
        "activations": kept_bytes,
        **sent.bytes,
    }


def test_two_processes_hold_and_send_what_is_predicted(tmp_path: Path) -> None:
    """Weights, gradients, optimizer and traffic to the byte, activations within 3 %, along context 30."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *torchrun, __file__, str(tmp_path / "measured.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for case, seen in zip(CASES, json.loads((tmp_path / "measured.json").read_text()), strict=True):
        prediction = predicted(*case)
        for what in ("parameters", "gradients", "optimizer"):
            assert getattr(prediction.memory, what) == seen.pop(what), (case, what)
        near = 0.3 if case[1] == "context" else 0.03  # joining the parts of a spread call keeps copies
        assert prediction.memory.activations == pytest.approx(seen.pop("activations"), rel=near), case
        sent = {SENT[row.what]: row.sent for row in prediction.exchanges}
        if case[1] == "context":
            assert seen.pop("allreduce") < 100, "numbers of the loss"
        assert sent == pytest.approx(seen), case


def predicted(name: str, mesh: str, half: bool) -> Prediction:
    """The same as `measured`."""
    sizes = ParallelConfig(**MESHES[mesh])
    return predict(config_of(name), Setting(mesh=sizes, batch=BATCH, length=LENGTH, half=half))


@pytest.mark.parametrize("half", [False, True])
def test_a_layer_of_gpt2_by_hand(half: bool) -> None:
    """The equations at the head of `predict_trace`."""
    config = config_of("decoder")
    e, f, h, tokens = 64, 192, 4, BATCH * LENGTH
    norms, dropout = 2 * (4 * e + 8), 2 * e
    attention = 2 * 7 * e + 4 * h if half else 4 * (5 * e + h)
    feedforward = 2 * (e + 2 * f) if half else 4 * (e + 2 * f)
    copies = 2 * (4 * e * e + 2 * e * f) if half else 0
    expected = tokens * (norms + dropout + attention + feedforward) + copies
    assert kept(config, BATCH, LENGTH, half).layers == [expected] * 4


@pytest.mark.parametrize("half", [False, True])
def test_layers_that_are_computed_again_keep_their_inputs(half: bool) -> None:
    config = config_of("decoder")
    model: Any = create_model("gpt2", **MODELS["decoder"][1]).train()
    memories: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        memories[tensor.untyped_storage()._cdata] = tensor
        return tensor

    ids = torch.randint(0, 300, (BATCH, LENGTH))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    saved = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with recomputing(model, True), saved, autocast:
        _ = model(input_ids=ids, labels=ids).loss
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    seen = sum(x.untyped_storage().nbytes() for key, x in memories.items() if key not in own)
    prediction = predict(config, Setting(batch=BATCH, length=LENGTH, half=half))
    layer = kept(config, BATCH, LENGTH, half)
    assert prediction.memory.recomputed - (layer.layers[0] - layer.inputs[0]) == pytest.approx(seen, rel=0.05)


def test_a_window_exchanges_its_edges_alone() -> None:
    assert exchanged_keys(Full(), 4096, 4, causal=False) == Keys(3072, 3072, 4096, 0), "a ring"
    assert exchanged_keys(None, 4096, 4, causal=True, rings=False) == Keys(3072, 0, 3072, 3072)
    for causal, edges in ((False, 128), (True, 64)):  # of one run: before it, and behind it in an encoder
        assert exchanged_keys(Window(64), 4096, 4, causal) == Keys(edges, 0, edges, edges)
    mesh = ParallelConfig(context=4)
    rows = {
        pattern: predict(
            model_config("llama-3.2-1b", {"attention": pattern}), Setting(mesh=mesh, length=8192)
        )
        for pattern in ("Causal()", "Window(64)")
    }
    full, window = rows["Causal()"], rows["Window(64)"]
    sent, again = (
        [row.sent for row in rows if row.dimension == "context"]
        for rows in (window.exchanges, window.exchanges_again)
    )
    assert sent[0] < next(row.sent for row in full.exchanges if row.dimension == "context") / 40
    assert again == [2 * sent[0], sent[1]]


def test_every_dimension_divides_what_it_says() -> None:
    config = model_config("llama-3.2-1b", {})
    assert isinstance(config, ModelConfig)
    alone = predict(config, Setting(length=4096)).memory
    for name in ("shard", "tensor", "context", "pipeline"):
        passes = 4 if name == "pipeline" else 1
        setting = Setting(mesh=ParallelConfig(**{name: 4}), length=4096, passes=passes)
        memory = predict(config, setting).memory
        divides = 2.4 if name == "pipeline" else 4  # the first and the last stage have the table whole
        assert alone.parameters / memory.parameters == pytest.approx(divides, rel=0.02), name
        assert memory.recomputed < memory.activations
        assert memory.activations < alone.activations or name in ("shard", "pipeline")
    many = Setting(mesh=ParallelConfig(pipeline=4), length=4096, passes=8)
    assert predict(config, many).stage == 0, "the first stage keeps the passes of all that follow"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gpt2 --mesh tensor=5", "tensor=5 does not divide 12 heads of the decoder"),
        ("gpt2 --mesh tensro=5", "unknown dimension of the mesh 'tensro': did you mean 'tensor'?"),
        ("gpt2 --mesh data=x", "mesh: expected data=N once, with a number of processes, got 'data=x'"),
        ("gpt2 --mesh pipeline=13", "pipeline: 13 stages for 12 layers; use at most one a layer"),
        ("gpt2 --mesh pipeline=2,context=2", "pipeline: not together with context yet"),
        ("gpt2 --mesh pipeline=4 --accumulate 2", "needs as many microbatches as stages, 4, got 2"),
        ("gpt2 --mesh data=2 --length 2048", "--length: gpt2 takes 1024 tokens at most, got 2048"),
        ("gpt2 --mesh data=2 --batch 0", "--batch: expected 1 or more, got 0"),
        ("gpt2 --batch 2", "--batch: goes with --mesh"),
        ("gpt2 --mesh data=2 --heads 2", "--heads: belongs to `show pattern`"),
        ("dt-gym --mesh data=2", "dt-gym: not a model of texts"),
        ("RECIPE --mesh data=2 --accumulate 0", "--accumulate: expected 1 or more, got 0"),
    ],
)
def test_what_the_command_refuses(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_the_command_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama-3.2-1b", "--mesh", "data=2,shard=2", "--batch", "4", "--length", "1024"]) == 0
    shown = capsys.readouterr().out
    assert "llama-3.2-1b on 4 GPUs: data 2 x shard 2; products in bf16, weights float32; adamw" in shown
    assert "4 texts of 1,024 tokens for each of 4 batches, 16,384 tokens in all" in shown
    for row in ("gathered weights (shard)", "all-gather of weights", "all-reduce of gradients", "sum"):
        assert row in shown
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: gpt2\ntask: {kind: lm, row_length: 512, batch_tokens: 4096}\noptimizer: {kind: sgd}\n"
        "training: {accumulate: 3, engine: {precision: bf16}}\n"
    )
    assert main(["show", str(recipe), "--mesh", "data=2"]) == 0
    assert "3 x 8 texts of 512 tokens for each of 2 batches" in capsys.readouterr().out


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [measured(*case) for case in CASES]
    every: list[Any] = [None, None]
    dist.all_gather_object(every, results)
    results = [{name: max(a[name], b[name]) for name in a} for a, b in zip(*every)]
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    dist.destroy_process_group()
