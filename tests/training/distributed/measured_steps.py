"""What a training step of each process holds and sends, beside what `polyformer show --mesh` predicts.

`torchrun --nproc-per-node 2 tests/training/distributed/measured_steps.py out.json` (or 4) prints a table.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from polyformer.attention.functional.key_exchange import counted_transfers
from polyformer.core.ops import cross_entropy
from polyformer.core.sequence.context_parallel import context_parallel
from polyformer.models.config import ModelConfig
from polyformer.models.presets import create_model, model_config
from polyformer.training.config import ParallelConfig
from polyformer.training.distributed.fully_sharded import apply_fsdp, local_shard, split_groups_by_mesh
from polyformer.training.distributed.pipeline import Pipeline
from polyformer.training.distributed.predict import Prediction, predict
from polyformer.training.distributed.predict_local import TrainingSetup
from polyformer.training.distributed.tensor_parallel import apply_tensor_parallel
from polyformer.training.machine import Mesh, open_mesh
from polyformer.training.optimizers import OptimizerConfig

BATCH, LENGTH = 3, 128
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "max_position_embeddings": LENGTH,
}
FEW = {**SMALL, "num_hidden_layers": 2}
NARROW = "gated(intermediate_size=96)"
UNSIZED = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("gpt2", SMALL),
    "gated": ("llama-2-7b", {"num_key_value_heads": 2, **SMALL}),
    "windows": ("llama-2-7b", {"num_key_value_heads": 2, **SMALL, "attention": "Window(16)"}),
    "encoder": ("bert-base", SMALL),
    "encoder-decoder": ("transformer-small", SMALL),
    "experts": (
        "gpt2",
        {**UNSIZED, "feedforward": f"experts(experts=4, expert={NARROW}, shared_expert={NARROW})"},
    ),
    "features": ("gpt2", {**FEW, "attention": "performer(features=24)"}),
    "both ways": ("bert-base", {**FEW, "attention": "rfa(features=24)"}),
    "projections": ("bert-base", {**FEW, "attention": f"linformer(max_length={LENGTH}, k=16)"}),
    "pools": (
        "bert-base",
        {**FEW, "attention": f"linformer(max_length={LENGTH}, k=((16,8),), projection=mean)"},
    ),
    "spans": ("gpt2", {**FEW, "attention": "adaptive_span(ramp=8, max_span=64)"}),
}


class Case(NamedTuple):
    """A model of `MODELS` on a mesh; half: in bf16."""

    model: str
    mesh: dict[str, Any]
    half: bool = False
    optimizer: str = "adamw"


DATA, SHARD, TENSOR, CONTEXT = ({name: 2} for name in ("data", "shard", "tensor", "context"))
STAGES: dict[str, Any] = {"pipeline": 2}
INTERLEAVED, GPIPE = {**STAGES, "stages": 2}, {**STAGES, "pipeline_schedule": "gpipe"}
CASES = {
    2: [
        *(Case("decoder", mesh, half) for mesh in (DATA, SHARD, TENSOR, CONTEXT) for half in (False, True)),
        *(Case("gated", TENSOR), Case("gated", CONTEXT, True)),
        *(Case("windows", CONTEXT), Case("windows", CONTEXT, True)),
        *(Case("encoder", SHARD, True), Case("encoder-decoder", TENSOR, True)),
        *(
            Case("experts", TENSOR),
            Case("experts", CONTEXT),
            Case("features", CONTEXT, True),
            Case("both ways", CONTEXT),
            Case("projections", CONTEXT, True),
            Case("pools", CONTEXT),
        ),
        *(Case("spans", CONTEXT), Case("decoder", STAGES), Case("encoder-decoder", STAGES, True)),
        *(Case("decoder", INTERLEAVED, True), Case("encoder-decoder", INTERLEAVED), Case("encoder", GPIPE)),
        Case("encoder-decoder", CONTEXT, True),
        *(Case("decoder", SHARD, optimizer=kind) for kind in ("muon", "sgd", "sgd(momentum=0)")),
        Case("decoder", DATA, optimizer="adafactor"),
    ],
    4: [
        Case(model, mesh, half)
        for model in ("decoder", "encoder", "encoder-decoder", "experts", "windows")
        for mesh in (
            {"shard": 4},
            DATA | SHARD,
            SHARD | TENSOR,
            CONTEXT | TENSOR,
            {"context": 4},
            STAGES | DATA,
            STAGES | SHARD,
        )
        for half in (False, True)
    ],
}
"""By the number of processes."""

SENT = {
    "all-gather of weights": "allgather",
    "reduce-scatter of gradients": "reduce_scatter",
    "all-reduce of gradients": "allreduce",
    "all-reduce of activations": "allreduce",
    "all-reduce of gradients of shared weights": "allreduce",
    "hidden states and gradients": "send",
}
"""What `Sent` and `counted_transfers` call the rows of a prediction; others as they are."""


def config_of(name: str) -> ModelConfig:
    """The configuration of one of `MODELS`."""
    preset, options = MODELS[name]
    return model_config(preset, options)


PREDICTIONS: dict[str, Prediction] = {}
"""What was predicted, by model and setting: tracing a model takes longer than its step."""


def predicted(case: Case) -> Prediction:
    """What is predicted of it."""
    kind = {"sgd(momentum=0)": "sgd without momentum"}.get(case.optimizer, case.optimizer)
    mesh = ParallelConfig.from_dict(case.mesh)
    passes = 2 * mesh.pipeline if mesh.pipeline > 1 else 1
    setting = TrainingSetup(
        mesh=mesh, batch=BATCH, length=LENGTH, half=case.half, optimizer=kind, passes=passes
    )
    key = f"{case.model}, {setting}"
    if key not in PREDICTIONS:
        PREDICTIONS[key] = predict(config_of(case.model), setting)
    return PREDICTIONS[key]


def sent_as_predicted(prediction: Prediction) -> dict[str, float]:
    """Bytes by the names of `Sent`."""
    sent: dict[str, float] = {}
    for row in prediction.exchanges:
        name = SENT.get(row.what, row.what)
        sent[name] = sent.get(name, 0) + row.sent
    return sent


COLLECTIVES = {"allgather_base": "allgather", "reduce_scatter": "reduce_scatter", "allreduce": "allreduce"}


class Sent(TorchDispatchMode):
    """Counts the bytes that a process sends, in rings, by the kind of exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].replace("all_reduce", "allreduce")
        if func.namespace in ("c10d", "_c10d_functional"):
            if name == "send":
                self.add("send", sum(tensor.nbytes for tensor in args[0]))
            kind = next((kind for part, kind in COLLECTIVES.items() if part in name), None)
            if kind is not None:
                n = _group_size(args)
                whole = args[0] if kind != "reduce_scatter" else args[1]
                tensors = [whole] if isinstance(whole, Tensor) else list(whole)
                share = (2 if kind == "allreduce" else 1) * (n - 1) / n
                self.add(kind, share * sum(tensor.nbytes for tensor in tensors))
        return func(*args, **kwargs or {})

    def add(self, kind: str, number: float) -> None:
        self.bytes[kind] = self.bytes.get(kind, 0) + number


def _group_size(arguments: Any) -> int:
    """Of the process group among the arguments of a collective."""
    for argument in arguments:
        if isinstance(argument, str) and argument not in ("sum", "avg"):
            return _resolve_process_group(argument).size()  # type: ignore[arg-type]
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()
    raise AssertionError("a collective without a group")


class Peak:
    """The most bytes of saved tensors that are there at once, the parameters of `model` apart."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.uses, self.now, self.most = model, dict[int, int](), 0, 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside, tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved.tensor)

    def pack(self, tensor: Tensor) -> "Saved":
        """Count a tensor that is no parameter as they are now: those that are gathered come and go."""
        shards = (getattr(parameter, "_local_tensor", parameter) for parameter in self.model.parameters())
        own = {shard.untyped_storage()._cdata for shard in shards}  # to_local() would be recorded by autograd
        return Saved(None if tensor.untyped_storage()._cdata in own else self, tensor)

    def add(self, storage: torch.UntypedStorage, number: int, size: int) -> None:
        """One use more or less of a memory."""
        before = self.uses.get(storage._cdata, 0)
        self.uses[storage._cdata] = before + number
        self.now += size if before == 0 else -size if before + number == 0 else 0
        self.most = max(self.most, self.now)


class Saved:
    """A tensor that is kept for a backward pass, for as long."""

    def __init__(self, peak: Peak | None, tensor: Tensor) -> None:
        self.peak, self.tensor, self.size = peak, tensor, tensor.untyped_storage().nbytes()
        if peak is not None:
            peak.add(tensor.untyped_storage(), 1, self.size)

    def __del__(self) -> None:
        if self.peak is not None:
            self.peak.add(self.tensor.untyped_storage(), -1, self.size)


def divide(model: nn.Module, mesh: Mesh, root: nn.Module) -> nn.Module:
    """What runs: `model`, divided by `apply_fsdp` and copied along `data`; root: what is called to run it."""
    if mesh.sharding.size() > 1 and mesh.size("shard") * mesh.size("context") > 1:
        apply_fsdp(model, mesh.sharding, root)
    elif mesh.size("data") > 1 and mesh.size("pipeline") == 1:
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.group("data"))
    return model


def measured(case: Case) -> dict[str, float]:
    """What a training step of this process holds and sends; `stage`: its place in a pipeline."""
    preset, options = MODELS[case.model]
    torch.manual_seed(0)
    model: Any = create_model(preset, **options).train()
    parallel = ParallelConfig.from_dict(case.mesh)
    mesh = open_mesh(parallel, "cpu")
    if mesh.size("tensor") > 1:
        apply_tensor_parallel(model, mesh.device_mesh["tensor"])
    wrapped = divide(model, mesh, model) if mesh.size("pipeline") == 1 else model
    ids = torch.randint(3, 300, (BATCH, LENGTH))
    inputs = {"input_ids": ids, "labels": ids}

    def precision() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=case.half)

    pipeline = None
    if mesh.size("pipeline") > 1:
        pipeline = Pipeline(
            model,
            mesh.group("pipeline"),
            parallel.pipeline_schedule,
            parallel.stages,
            precision=precision,
            divide=lambda root: divide(model, mesh, root),
        )
    optimizer = OptimizerConfig.from_dict(case.optimizer).build(model)
    split_groups_by_mesh(optimizer)
    peak = Peak(model)
    spread = context_parallel(mesh.group("context")) if mesh.size("context") > 1 else nullcontext()
    with Sent() as sent, counted_transfers() as transfers, spread, peak.hooks():
        if pipeline is not None:
            passes = 2 * pipeline.size
            pipeline.step(passes * [inputs], passes * [1 / passes])
            if mesh.size("data") > 1:
                pipeline.sum_over_replicas(mesh.group("data"))
        else:
            with precision():
                loss = wrapped(**inputs).loss
            loss.backward()
    for transfer in transfers:
        sent.add(transfer.what, transfer.sent)
    if "gradients of sums of keys" in sent.bytes:  # an all-reduce, which both have counted
        sent.add("allreduce", -sent.bytes["gradients of sums of keys"])
    if mesh.size("context") > 1:  # a ring's keys, which both have counted
        sent.bytes.pop("send", None)
    parameters = [*model.parameters()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = {
        "parameters": sum(local_shard(parameter).nbytes for parameter in parameters if not parameter.is_meta),
        "gradients": sum(local_shard(gradient).nbytes for gradient in gradients),
    }
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held["optimizer"] = sum(
        local_shard(value).nbytes for value in states if isinstance(value, Tensor) and value.dim()
    )
    return {**held, "activations": peak.most, **sent.bytes, "stage": mesh.rank("pipeline")}


def largest(case: Case, every: list[dict[str, float]]) -> dict[str, float]:
    """Of all processes in the stage that is predicted, the most of each."""
    own = [row for row in every if row.pop("stage") == predicted(case).stage]
    return {name: max(row[name] for row in own) for name in own[0]}


def table(cases: list[Case], seen: list[dict[str, float]]) -> str:
    """Predicted / measured, in Markdown."""
    lines = ["| model | mesh | precision | weights, gradients, optimizer | activations | sent in a step |"]
    lines.append("|---|---|---|---|---|---|")
    for case, row in zip(cases, seen):
        memory, sent = predicted(case).memory, sent_as_predicted(predicted(case))
        held = [
            getattr(memory, what) / max(row[what], 1) for what in ("parameters", "gradients", "optimizer")
        ]
        total = sum(row.get(name, 0) for name in sent)
        mesh = ", ".join(f"{name} {number}" for name, number in case.mesh.items())
        lines.append(
            f"| {case.model}, {case.optimizer} | {mesh} | {'bf16' if case.half else 'float32'} | "
            f"{' '.join(f'{part:.4g}' for part in held)} | {memory.activations / row['activations']:.3f} of "
            f"{row['activations']:,.0f} | {sum(sent.values()) / total:.5g} of {total:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    cross_entropy.FEW = 0  # a prediction is for sizes at which no logits are kept
    dist.init_process_group("gloo")
    cases = CASES[dist.get_world_size()]
    results = [measured(case) for case in cases]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, results)
    if dist.get_rank() == 0:
        results = [largest(case, list(rows)) for case, rows in zip(cases, zip(*every))]
        Path(sys.argv[1]).write_text(json.dumps(results))
        print(table(cases, results))
    dist.destroy_process_group()
