"""`export_model`: a model as a file for `torch.export`, or for ONNX and its runtimes."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from polyformer.attention.functional.backends.blocks import graph_calls
from polyformer.core.errors import InputError, quote
from polyformer.core.files import atomic_write, folder_for_files, write_json, writing
from polyformer.core.imports import needs_extra
from polyformer.core.modules import evaluating
from polyformer.core.paths import checked_path
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.pretrained import CONFIG, hub_labels, label_names, write_generation
from polyformer.models.checkpoints.save import find_family
from polyformer.models.export_graphs import DecoderGraph, RowsGraph, SourceGraph, TargetGraph

__all__ = ["ExportedModel", "export_model"]


def write_description(model: Transformer, folder: Path, longest: int) -> None:
    """Write config.json, and generation_config.json if the model has generation settings.

    config.json has the fields of transformers, if the model belongs to a public family; otherwise only
    model_type, `id2label`, `label2id`, max_position_embeddings and the special tokens. An encoder-decoder
    always has its special tokens and is_encoder_decoder.
    """
    try:
        _, fields, _ = find_family(model.config)
    except InputError:
        fields = {"model_type": "polyformer", "max_position_embeddings": longest, **_special_tokens(model)}
    described: dict[str, Any] = dict(fields)
    if model.encoder is not None and model.decoder is not None:
        described = {**_special_tokens(model), **described, "is_encoder_decoder": True}
    if hasattr(model.config.head, "num_labels"):
        described |= hub_labels(label_names(model))
    write_json(folder / CONFIG, described)
    write_generation(model, folder)


def _special_tokens(model: Transformer) -> dict[str, int]:
    """Return the special tokens that the model has, with transformers' names."""
    special, both = model.config.special, model.encoder is not None and model.decoder is not None
    start = "decoder_start_token_id" if both else "bos_token_id"
    named = {"pad_token_id": special.pad, start: special.bos, "eos_token_id": special.eos}
    return {name: token for name, token in named.items() if token is not None}


class TextGraph(RowsGraph):
    """An encoder, or a decoder without a cache.

    outputs: the predictions of the head, and the last hidden states [B, T, E].
    """

    length = "length"

    def __init__(self, model: Transformer):
        stack = model.encoder or model.decoder
        assert stack is not None
        super().__init__(model, stack)
        predictions = ["logits", "sentence_logits"] if model.head.predicts_sentence else ["logits"]
        self.outputs = *predictions, "last_hidden_state"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the predictions and the last hidden states."""
        output = self.model(input_ids, attention_mask, token_type_ids=token_type_ids)
        predictions = output.predictions()
        every = predictions if isinstance(predictions, tuple) else (predictions,)
        return *every, output.last_hidden_state


class PairGraph(nn.Module):
    """An encoder-decoder without a cache for `torch.export`.

    inputs: token ids and an attention mask [B, S] of the source, and token ids [B, U] of the target without
    padding before it; a head that does not predict tokens reads the source as target. outputs: the
    predictions of the head, and the last hidden states of the decoder.
    """

    def __init__(self, model: Transformer):
        super().__init__()
        assert model.encoder is not None
        assert model.decoder is not None
        self.model = model
        target = ["decoder_input_ids"] if model.head.predicts_next else []
        self.inputs = "input_ids", "attention_mask", *target
        self.outputs = "logits", "last_hidden_state"
        own = [f"{layer}" for layer in range(len(model.decoder.sequence))]
        encoder = [f"{layer} (encoder)" for layer in range(len(model.encoder.sequence))]
        self.layers = *encoder, *(name for layer in own for name in (layer, f"{layer} (of the source)"))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the predictions and the last hidden states."""
        output = self.model(input_ids, attention_mask, decoder_input_ids=decoder_input_ids)
        return output.logits, output.last_hidden_state

    def example(self, longest: int) -> tuple[Tensor, ...]:
        """Return inputs of two rows, with more tokens than a block of attention if possible."""
        device = next(self.model.parameters()).device
        lengths = min(301, longest), min(301, longest), min(300, longest)
        return tuple(torch.ones(2, length, dtype=torch.long, device=device) for length in lengths)[
            : len(self.inputs)
        ]

    def axes(self) -> dict[str, Any]:
        """Return the names of the axes that have any size, by argument of `forward`."""
        names = {"input_ids": "source", "attention_mask": "source", "decoder_input_ids": "length"}
        return {name: {0: "batch", 1: names[name]} for name in self.inputs}


UNLIMITED = 1 << 20
"""The most tokens of a text in the graph of a model that reads texts of any length."""

Format = Literal["onnx", "torch"]
Graph = DecoderGraph | PairGraph | SourceGraph | TargetGraph | TextGraph


@dataclasses.dataclass(frozen=True, eq=False)
class ExportedModel:
    """A model in the file of a graph.

    inputs, outputs: their names, in order. longest: the most tokens of a text. plans: how each layer computes
    attention, with the reasons against computing it in blocks. layers: the layer of each plan. program: what
    `torch.export.export` returns. decoder: the second graph of an encoder-decoder with a cache.
    """

    file: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    longest: int
    plans: tuple[str, ...]
    layers: tuple[str, ...]
    program: ExportedProgram = dataclasses.field(repr=False)
    decoder: "ExportedModel | None" = None

    def __str__(self) -> str:
        """Return a description of several lines; layers with equal plans share a line."""
        layers: dict[str, list[str]] = {}
        for layer, plan in zip(self.layers, self.plans):
            layers.setdefault(plan, []).append(layer)
        attention = (f"attention of layers {', '.join(own)}: {plan}" for plan, own in layers.items())
        decoder = [] if self.decoder is None else [str(self.decoder)]
        return "\n".join([f"{self.file}: texts of up to {self.longest:,} tokens", *attention, *decoder])


def export_model(
    model: Transformer,
    folder: str | Path,
    format: Format = "onnx",
    cache: bool = True,
    *,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> ExportedModel:
    """Write a model of texts as a graph for any number of rows and tokens to `folder`.

    The file is model.onnx (for weights of over 2 GB with model.onnx.data) or, for `torch.export.load`,
    model.pt2. Inputs are `input_ids` and `attention_mask` [B, T] (and `token_type_ids`, if there are several
    types), outputs `logits` (`sentence_logits`) and `last_hidden_state`.

    A decoder has a cache as input and output, with transformers' names: `past_key_values.L.key` and `.value`
    [B, Hkv, P, D] of each layer L for P >= 0 earlier tokens, and `present.L.key` and `.value` [B, Hkv, P + T,
    D] for the next call. The mask [B, P + T] covers both; padding may be on either side.

    An encoder-decoder has two files, with optimum's names. encoder_model reads the source [B, S] once, and
    also returns `present.L.encoder.key` and `.value` [B, Hkv, S, D]. decoder_with_past_model reads the next
    `input_ids` [B, T] of the target, `encoder_attention_mask` [B, S], and `past_key_values.L.decoder.key`,
    ..., `past_key_values.L.encoder.value`; it returns `logits` and `present.L.decoder.key` and `.value`.

    cache: whether a decoder has a cache; without it it reads whole texts, and an encoder-decoder is a single
    graph with `decoder_input_ids` [B, U]. max_tokens: the most tokens of a text, by default the model's
    positions. max_rows: the most rows, by default any number. Runtimes that plan memory ahead, such as
    ExecuTorch, need both bounds.

    Raises `InputError` for other models, quantized weights, and a decoder with another state than a KV cache.
    """
    if format not in ("onnx", "torch"):
        raise InputError(f"format: expected 'onnx' or 'torch', got {quote(format)}")
    graphs = _graphs(model, cache)
    folder, longest = checked_path(str(folder)), _longest(model, max_tokens)
    if max_rows is not None and max_rows < 1:
        raise InputError(f"max_rows: expected 1 or more, got {max_rows}")
    with folder_for_files(folder):
        exported = [
            _export(graph, folder / name, format, longest, max_rows) for name, graph in graphs.items()
        ]
    first, *others = exported
    return dataclasses.replace(first, decoder=others[0]) if others else first


def _graphs(model: Transformer, cache: bool) -> dict[str, Graph]:
    """Return the modules to export by the names of their files."""
    if not isinstance(model, Transformer):
        raise InputError(f"model: expected a Transformer that reads texts, got {type(model).__name__}")
    if model.config.weights is not None:
        raise InputError(
            f"model: expected floating-point weights, got {model.config.weights}; load it with "
            'from_pretrained(..., weights="float32")'
        )
    if model.encoder is not None and model.decoder is not None:
        if not cache:
            return {"model": PairGraph(model)}
        return {"encoder_model": SourceGraph(model), "decoder_with_past_model": TargetGraph(model)}
    return {"model": DecoderGraph(model) if cache and model.decoder is not None else TextGraph(model)}


def _export(graph: Graph, path: Path, format: Format, longest: int, rows: int | None) -> ExportedModel:
    """Write the graph to a file `path` with the suffix of the format, and return its description."""
    example = graph.example(longest)
    if rows == 1:
        example = tuple(tensor[:1] for tensor in example)
    sizes = _sizes(graph.axes(), longest, rows)
    with evaluating(graph.model), torch.no_grad(), graph_calls(longest) as calls:
        try:
            program = torch.export.export(graph, example, dynamic_shapes=sizes, strict=False)
        except RuntimeError as error:
            raise _without_graph(graph.model, error) from error
    file = path.with_name(path.name + (".onnx" if format == "onnx" else ".pt2"))
    if format == "onnx":
        _write_onnx(program, graph, file)
    else:
        atomic_write(file, lambda path: _save(program, path))
    plans, layers = tuple(calls.plans), graph.layers
    if len(layers) != len(plans):  # a mechanism may call attention several times, or not at all
        layers = tuple(map(str, range(len(plans))))
    return ExportedModel(file, graph.inputs, graph.outputs, longest, plans, layers, program)


def _without_graph(model: Transformer, error: RuntimeError) -> InputError:
    """Return the error for a model that torch cannot export, with the parts that may be the cause."""
    stacks = {"encoder": model.config.encoder, "decoder": model.config.decoder}
    parts = [
        f"{name}.attention {quote(stack.attention.mechanism.kind)}, {name}.depth {quote(stack.depth.kind)}"
        for name, stack in stacks.items()
        if stack is not None
    ]
    return InputError(
        f"model: expected operations for texts of any length, got {'; '.join(parts)}, of which torch.export "
        f"refuses one ({str(error).splitlines()[0]}); use softmax attention, with a pattern for long texts, "
        "and a fixed depth"
    )


def _longest(model: Transformer, max_tokens: int | None) -> int:
    """Return the most tokens of a text, or `max_tokens`; the model's positions may limit them."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    limit = min(stack.position.max_positions or UNLIMITED for stack in stacks)
    if max_tokens is not None and not 1 <= max_tokens <= limit:
        raise InputError(f"max_tokens: expected 1 to {limit:,}, the model's limit, got {max_tokens:,}")
    return limit if max_tokens is None else max_tokens


def _sizes(axes: Any, longest: int, rows: int | None) -> Any:
    """Return `axes` with the sizes of the named axes."""
    dims = {
        "batch": Dim.STATIC if rows == 1 else Dim("batch", min=1, max=rows),
        **{name: Dim(name, min=1, max=longest) for name in ("length", "source")},
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


def _write_onnx(program: ExportedProgram, graph: Graph, file: Path) -> None:
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
