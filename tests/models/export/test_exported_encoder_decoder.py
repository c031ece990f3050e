"""Exported encoder-decoders: one graph reads the source, and one decodes the same tokens as the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import polyformer
from polyformer.core.errors import InputError
from polyformer.models.export import ExportedModel, export_model
from polyformer.nn.heads import ClassifyConfig
from polyformer.nn.stack import EmbeddingConfig

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {"num_hidden_layers": 2, "position": "rope", "num_key_value_heads": 2}
LEARNED = {"num_hidden_layers": 1, "max_position_embeddings": 64, **SIZES}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "sinusoids": ("transformer-tiny", {}, (4, 1)),
    "relative biases": ("t5-small", {"num_hidden_layers": 1, **SIZES}, (4, 2)),
    "learned positions": ("bart-base", LEARNED, (4, 4)),
    "rope and grouped heads": ("transformer-tiny", GROUPED, (4, 1)),
}
"""Presets, options, and factors of the vectors of tokens and of the other matrices: with these and an untied
output, random models write texts that depend on the source, and not a single token again and again."""

BATCHES = (9, 1, 4), (2,), (17, 30)
STEPS = 12


def translator(name: str) -> polyformer.Transformer:
    torch.manual_seed(0)
    preset, options, (tokens, others) = MODELS[name]
    untied = EmbeddingConfig(tied=False)
    model = polyformer.create_model(preset, **options, vocab_size=50, embedding=untied).eval()
    with torch.no_grad():
        for own, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(tokens if "tokens" in own else others)
    return model


def sources(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random sources [B, S] of these lengths, padded on the right, and their mask."""
    ids = torch.randint(3, 50, (len(lengths), max(lengths)))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def first_inputs(model: polyformer.Transformer, exported: ExportedModel, encoded: Any) -> dict[str, Tensor]:
    """The caches of the first step, from the outputs of the encoder; those of the target are empty."""
    assert model.decoder is not None
    assert exported.decoder is not None
    attention = model.decoder.sequence[0].attention
    source = dict(zip(exported.outputs, encoded))
    empty = torch.zeros(len(encoded[0]), attention.config.kv_heads, 0, attention.head_size)
    return {
        name: source.get(name.replace("past_key_values", "present"), empty)
        for name in exported.decoder.inputs[2:]
    }


def continued(exported: ExportedModel, caches: dict[str, Any], present: Any) -> dict[str, Any]:
    """The caches of the next step of a decoder."""
    assert exported.decoder is not None
    names = (name.replace("present", "past_key_values") for name in exported.decoder.outputs[1:])
    return caches | dict(zip(names, present))


@pytest.mark.parametrize("name", MODELS)
def test_onnxruntime_decodes_the_same_tokens_of_padded_sources(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = translator(name)
    exported = export_model(model, tmp_path)
    assert exported.decoder is not None
    files = exported.file, exported.decoder.file
    assert [file.name for file in files] == ["encoder_model.onnx", "decoder_with_past_model.onnx"]
    encoder, decoder = map(onnxruntime.InferenceSession, files)
    texts = set()
    for lengths in BATCHES:
        ids, mask = sources(lengths)
        generated = model.generate(ids, mask, max_new_tokens=STEPS, eos=()).sequences
        start = torch.full((len(ids), 1), model.config.special.bos or 0)
        target = torch.cat([start, generated], 1)
        texts |= set(map(tuple, generated.tolist()))
        encoded = encoder.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        caches: dict[str, Any] = {
            key: np.asarray(x) for key, x in first_inputs(model, exported, encoded).items()
        }
        tokens, logits = [start.numpy()], []
        for _ in range(STEPS):
            feed = {"input_ids": tokens[-1], "encoder_attention_mask": mask.numpy(), **caches}
            scores, *present = decoder.run(None, feed)
            caches = continued(exported, caches, present)
            logits.append(torch.from_numpy(scores))
            tokens.append(scores[:, -1:].argmax(-1))
        assert np.concatenate(tokens, 1).tolist() == target.tolist()
        expected = model(ids, mask, decoder_input_ids=target[:, :-1]).logits
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)
    assert len(texts) > 3
    assert len({token for text in texts for token in text}) > 5


def test_an_onnx_decoder_has_named_axes(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    exported = export_model(translator("rope and grouped heads"), tmp_path)
    assert exported.decoder is not None
    inputs = onnxruntime.InferenceSession(exported.decoder.file).get_inputs()
    assert tuple(x.name for x in inputs) == exported.decoder.inputs
    assert inputs[5].name == "past_key_values.0.encoder.value"
    assert [x.shape for x in inputs[:5]] == [
        ["batch", "length"],
        ["batch", "source"],
        ["batch", 2, "past", 8],
        ["batch", 2, "past", 8],
        ["batch", 2, "source", 8],
    ]


@pytest.mark.parametrize("name", list(reversed(MODELS)))
def test_a_target_is_read_in_parts_of_any_length(name: str, tmp_path: Path) -> None:
    model = translator(name)
    exported = export_model(model, tmp_path, "torch")
    assert exported.decoder is not None
    encoder, decoder = (torch.export.load(x.file).module() for x in (exported, exported.decoder))
    for lengths, parts in ((9, 1, 4), (1, 5, 2)), ((2,), (3, 1)), ((1,), (1,)), ((30, 17), (20,)):
        ids, mask = sources(lengths)
        mask[0, : max(lengths) // 3] = 0  # padding before the source
        target = torch.randint(3, 50, (len(ids), sum(parts)))
        expected = model(ids, mask, decoder_input_ids=target).logits
        caches = first_inputs(model, exported, encoder(ids, mask))
        logits = []
        for part in target.split(parts, 1):  # type: ignore[arg-type]
            scores, *present = decoder(part, mask, *caches.values())
            caches = continued(exported, caches, present)
            logits.append(scores)
        torch.testing.assert_close(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_both_graphs_have_the_bounds_that_memory_planning_needs(tmp_path: Path) -> None:
    exported = export_model(translator("sinusoids"), tmp_path, "torch", max_tokens=20, max_rows=1)
    assert exported.decoder is not None
    assert exported.longest == exported.decoder.longest == 20
    for graph in exported, exported.decoder:
        assert all(limits.upper <= 20 for limits in graph.program.range_constraints.values())


def test_the_description_names_layers_of_both_graphs(tmp_path: Path) -> None:
    exported = export_model(translator("rope and grouped heads"), tmp_path, "torch")
    lines = str(exported).splitlines()
    assert lines[1] == "attention of layers 0, 1: dense (its pattern has no rule for blocks)"
    assert "decoder_with_past_model.pt2: texts of up to" in lines[2]
    assert lines[3] == "attention of layers 0, 1: dense (the queries continue a cache)"
    assert lines[4].startswith("attention of layers 0 (of the source), 1 (of the source): dense")


def test_without_a_cache_a_graph_reads_both_texts(tmp_path: Path) -> None:
    model = translator("relative biases")
    exported = export_model(model, tmp_path, "torch", cache=False)
    assert exported.inputs == ("input_ids", "attention_mask", "decoder_input_ids")
    assert (exported.file.name, exported.decoder) == ("model.pt2", None)
    assert exported.layers == ("0 (encoder)", "0", "0 (of the source)")
    graph = torch.export.load(exported.file).module()
    for lengths, length in ((9, 1, 4), 7), ((2,), 1), ((1, 1), 20):
        ids, mask = sources(lengths)
        target = torch.randint(3, 50, (len(ids), length))
        expected = model(ids, mask, decoder_input_ids=target).logits
        torch.testing.assert_close(graph(ids, mask, target)[0], expected, rtol=1e-4, atol=1e-4)


def test_a_classifier_of_both_stacks_reads_the_source_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head: Any = ClassifyConfig(num_labels=3, pooling="last")
    model = polyformer.create_model("bart-base", **LEARNED, vocab_size=50, head=head).eval()
    exported = export_model(model, tmp_path, "torch", cache=False)
    assert exported.inputs == ("input_ids", "attention_mask")
    graph = torch.export.load(exported.file).module()
    for lengths in BATCHES:
        ids, mask = sources(lengths)
        torch.testing.assert_close(graph(ids, mask)[0], model(ids, mask).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"head": ClassifyConfig(num_labels=2, pooling="last")}, "its head 'classify' does not predict"),
        ({"depth": "act"}, "a memory or a depth policy decides from step to step"),
        ({"cross_attention": "WaitK(3)"}, "its cross-attention compares positions of both texts"),
        ({"attention": "retention"}, "its layers have another state"),
    ],
)
def test_models_with_more_than_caches_are_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = polyformer.create_model("transformer-tiny", **options, vocab_size=50)
    with pytest.raises(InputError, match=f"cache: .*{reason}.*export it with cache=False"):
        export_model(model, tmp_path)


def test_cross_attention_by_positions_is_exported_without_a_cache(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = polyformer.create_model("transformer-tiny", vocab_size=50, cross_attention="WaitK(3)").eval()
    graph = export_model(model, tmp_path, "torch", cache=False).program.module()
    ids, mask = sources((9, 1, 4))
    target = torch.randint(3, 50, (3, 7))
    expected = model(ids, mask, decoder_input_ids=target).logits
    torch.testing.assert_close(graph(ids, mask, target)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "cache", "parts"),
    [
        ({"attention": "lsh"}, False, "encoder.attention 'lsh', encoder.depth 'fixed'; decoder"),
        ({"encoder": {"attention": "lsh"}}, True, "encoder.attention 'lsh'.* decoder.attention 'softmax'"),
    ],
)
def test_parts_that_torch_cannot_export_are_named(
    options: dict[str, Any], cache: bool, parts: str, tmp_path: Path
) -> None:
    model = polyformer.create_model("transformer-tiny", **options, vocab_size=50)
    with pytest.raises(InputError, match=f"model: expected operations .*{parts}.* use softmax attention"):
        export_model(model, tmp_path / "out", "torch", cache)
    assert not (tmp_path / "out").exists()
