"""`export_model`: a model as a file for `torch.export`, or for ONNX and its runtimes."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch.export import Dim, ExportedProgram

from polyformer.attention.functional.graph_calls import graph_calls
from polyformer.core.errors import InputError, quote
from polyformer.core.evaluation_mode import evaluating
from polyformer.core.files import atomic_write, folder_for_files, writing
from polyformer.core.optional_packages import needs_extra
from polyformer.core.paths import checked_path
from polyformer.models.architectures import Transformer
from polyformer.models.export.decoder import DecoderGraph
from polyformer.models.export.text import TextGraph

UNLIMITED = 1 << 20
"""The most tokens of a text in the graph of a model that reads texts of any length."""

Format = Literal["onnx", "torch"]


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedModel:
    """A model in the file of a graph.

    inputs, outputs: their names, in order. longest: the most tokens of a text. plans: how each layer computes
    attention, with the reasons against computing it in blocks. program: what `torch.export.export` returns.
    """

    file: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    longest: int
    plans: tuple[str, ...]
    program: ExportedProgram = dataclasses.field(repr=False)

    def __str__(self) -> str:
        """Return a description of several lines; layers with equal plans share a line."""
        layers: dict[str, list[str]] = {}
        for layer, plan in enumerate(self.plans):
            layers.setdefault(plan, []).append(str(layer))
        attention = (f"attention of layers {', '.join(own)}: {plan}" for plan, own in layers.items())
        return "\n".join([f"{self.file}: texts of up to {self.longest:,} tokens", *attention])


def export_model(
    model: Transformer,
    folder: str | Path,
    format: Format = "onnx",
    cache: bool = True,
    *,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> ExportedModel:
    """Write an encoder or a decoder as a graph for any number of rows and tokens to `folder`.

    The file is model.onnx (for weights of over 2 GB with model.onnx.data) or, for `torch.export.load`,
    model.pt2. Inputs are `input_ids` and `attention_mask` [B, T] (and `token_type_ids`, if there are several
    types), outputs `logits` (`sentence_logits`) and `last_hidden_state`.

    A decoder has a cache as input and output, with transformers' names: `past_key_values.L.key` and `.value`
    [B, Hkv, P, D] of each layer L for P >= 0 earlier tokens, and `present.L.key` and `.value` [B, Hkv, P + T,
    D] for the next call. The mask [B, P + T] covers both; padding may be on either side.

    cache: whether a decoder has a cache; without it it reads whole texts. max_tokens: the most tokens of a
    text, by default the model's positions. max_rows: the most rows, by default any number. Runtimes that plan
    memory ahead, such as ExecuTorch, need both bounds.

    Raises `InputError` for other models, quantized weights, and a decoder with another state than a KV cache.
    """
    if format not in ("onnx", "torch"):
        raise InputError(f"format: expected 'onnx' or 'torch', got {quote(format)}")
    graph = _graph(model, cache)
    folder, stack = checked_path(str(folder)), model.encoder or model.decoder
    assert stack is not None
    longest = _longest(stack.position.max_positions, max_tokens)
    if max_rows is not None and max_rows < 1:
        raise InputError(f"max_rows: expected 1 or more, got {max_rows}")
    example = graph.example(longest)
    if max_rows == 1:
        example = tuple(tensor[:1] for tensor in example)
    with evaluating(model), torch.no_grad(), graph_calls(longest) as calls:
        program = torch.export.export(
            graph, example, dynamic_shapes=_sizes(graph.axes(), longest, max_rows), strict=False
        )
    file = folder / ("model.onnx" if format == "onnx" else "model.pt2")
    with folder_for_files(folder):
        if format == "onnx":
            _write_onnx(program, graph, file)
        else:
            atomic_write(file, lambda path: _save(program, path))
    return ExportedModel(file, graph.inputs, graph.outputs, longest, tuple(calls.plans), program)


def _graph(model: Transformer, cache: bool) -> DecoderGraph | TextGraph:
    """Return the module to export."""
    if not isinstance(model, Transformer) or (model.encoder is not None and model.decoder is not None):
        kind = "an encoder-decoder" if isinstance(model, Transformer) else type(model).__name__
        raise InputError(f"model: expected an encoder or a decoder of texts, got {kind}; export its encoder")
    if model.config.weights is not None:
        raise InputError(
            f"model: expected floating-point weights, got {model.config.weights}; load it with "
            'from_pretrained(..., weights="float32")'
        )
    return DecoderGraph(model) if cache and model.decoder is not None else TextGraph(model)


def _longest(positions: int | None, max_tokens: int | None) -> int:
    """Return the most tokens of a text, for a model with `positions` positions, or any number."""
    limit = positions or UNLIMITED
    if max_tokens is not None and not 1 <= max_tokens <= limit:
        raise InputError(f"max_tokens: expected 1 to {limit:,}, the model's limit, got {max_tokens:,}")
    return limit if max_tokens is None else max_tokens


def _sizes(axes: Any, longest: int, rows: int | None) -> Any:
    """Return `axes` with the sizes of the named axes."""
    dims = {
        "batch": Dim.STATIC if rows == 1 else Dim("batch", min=1, max=rows),
        "length": Dim("length", min=1, max=longest),
        "past": Dim("past", min=0, max=longest),
        "total": Dim("total", min=1, max=2 * longest),
    }
    return {
        name: tuple({axis: dims[size] for axis, size in own.items()} for own in sizes)
        if isinstance(sizes, tuple)
        else {axis: dims[size] for axis, size in sizes.items()}
        for name, sizes in axes.items()
    }


def _save(program: ExportedProgram, path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file)


def _write_onnx(program: ExportedProgram, graph: DecoderGraph | TextGraph, file: Path) -> None:
    """Convert the program to ONNX, and write it."""
    with needs_extra("onnx", "format 'onnx': needs the packages onnx and onnxscript", "or format 'torch'"):
        import onnxscript  # noqa: F401 - torch's error for a missing package names no extra
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*", FutureWarning)  # torch's own
        warnings.filterwarnings("ignore", "# The axis name.*shares the same shape constraints")
        converted = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            dynamic_shapes=graph.axes(),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
        )
    assert converted is not None
    with writing(file):
        converted.save(file)
