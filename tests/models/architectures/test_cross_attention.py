"""A pattern between target and source in an encoder-decoder: training, padding, steps, streaming."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer import InputError, create_model
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.core.recorded_graph import RecordedGraph
from polyformer.models.architectures import Transformer
from polyformer.models.attached.attach_settings import parse_settings
from polyformer.models.checkpoints import convert, from_pretrained
from polyformer.models.config import ModelConfig

PATTERNS = ["Aligned(ratio=1.5, left=2, right=1)", "WaitK(k=2)", "PerHead([WaitK(1), Full()])"]


def model(pattern: str | None, preset: str = "transformer-tiny", **options: Any) -> Transformer:
    torch.manual_seed(0)
    small = {"vocab_size": 40, "num_hidden_layers": 2, "hidden_size": 32, "dropout": 0.0}
    small |= {"num_attention_heads": 4, "intermediate_size": 64}
    return create_model(preset, cross_attention=pattern, **small, **options).double().eval()


def texts(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(own: Transformer, loss: Tensor | None) -> list[Tensor]:
    assert loss is not None
    return list(torch.autograd.grad(loss, list(own.parameters()), allow_unused=True, materialize_grads=True))


def test_a_recorded_weight_is_where_the_equation_allows():
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    output = model("Aligned(1.0, 1, 0)")(
        texts(2, 11), mask, decoder_input_ids=texts(2, 9), output_attentions=True
    )
    assert output.cross_attentions is not None
    for weights in output.cross_attentions:
        for row, (padding, length) in enumerate([(0, 11), (4, 7)]):
            for i, line in enumerate(weights[row, 0] > 0):
                center = min(i, length - 1)
                seen = [j + padding for j in (center - 1, center) if j >= 0]
                assert line.nonzero().flatten().tolist() == seen


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_row_with_padding_is_the_row_without(pattern: str):
    own = model(pattern)
    source, target = texts(1, 9), texts(1, 8, seed=2)
    expected = own(source, decoder_input_ids=target, labels=target)
    slopes = gradients(own, expected.loss)
    for left, right in ((3, 0), (0, 4)):
        ids = torch.cat([texts(1, left), source, texts(1, right)], 1)
        mask = torch.tensor([[0] * left + [1] * 9 + [0] * right])
        actual = own(ids, mask, decoder_input_ids=target, labels=target)
        torch.testing.assert_close(actual.logits, expected.logits)
        for a, b in zip(gradients(own, actual.loss), slopes):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_steps_with_a_cache_are_one_pass(pattern: str):
    own, target = model(pattern), texts(2, 8, seed=2)
    mask = torch.tensor([[1] * 13, [0] * 5 + [1] * 8])
    expected = own(texts(2, 13), mask, decoder_input_ids=target).logits
    state, logits = own.encode(texts(2, 13), mask), []
    for part in target.split([3, 1, 1, 3], 1):
        output = own(decoder_input_ids=part, state=state)
        state = output.state
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected)


@pytest.mark.parametrize("search", [{"compile": True}, {"num_beams": 3}, {"num_beams": 2, "compile": True}])
def test_searches_read_the_same_source_tokens(search: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Batches of different lengths, beams and recorded steps give the text of a row by itself."""
    runs = []

    def compiled(graph: RecordedGraph, inputs: Any) -> Any:
        runs.append(graph)
        return lambda *tensors: graph.module(*tensors, *graph.constants)

    monkeypatch.setattr(
        RecordedGraph, "compiled", compiled
    )  # operation by operation, which takes no compiler
    own = model(PATTERNS[0])
    rows = [texts(1, 12), texts(1, 7, seed=4)]
    settings: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9}
    mask = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])
    ids = torch.cat([rows[0], torch.cat([texts(1, 5, seed=5), rows[1]], 1)])
    together = own.generate(ids, mask, **settings, **search).sequences
    assert bool(runs) == ("compile" in search)
    plain = {name: value for name, value in search.items() if name != "compile"}
    for row, source in enumerate(rows):
        assert torch.equal(own.generate(source, **settings, **plain).sequences[0], together[row])


def test_wait_k_reads_no_source_token_before_it_arrives():
    """With a causal encoder a changed source token j moves no output i before g(i) reaches it."""
    own = model("WaitK(3)", **{"encoder.attention": "Causal()"})
    source, target = texts(1, 10), texts(1, 10, seed=2)
    expected = own(source, decoder_input_ids=target).logits
    for place in range(10):
        changed = source.clone()
        changed[0, place] = (source[0, place] + 7) % 37 + 3
        moved = own(changed, decoder_input_ids=target).logits
        first = max(0, place + 1 - 3)  # the first i with 3 + i > place
        assert torch.equal(moved[:, :first], expected[:, :first])
        assert not torch.equal(moved[:, first], expected[:, first])


def test_a_converted_model_with_a_wide_window_is_the_same(tmp_path):
    dense = model(None)
    wide, report = convert(dense, cross_attention="Aligned(1.0, 20, 20)")
    assert not report.newly_initialized
    inputs = {"input_ids": texts(2, 11), "decoder_input_ids": texts(2, 9)}
    torch.testing.assert_close(wide(**inputs).logits, dense(**inputs).logits)
    narrow, _ = convert(dense, cross_attention="WaitK(1)")
    narrow.save_pretrained(tmp_path)
    assert torch.equal(from_pretrained(tmp_path)(**inputs).logits, narrow(**inputs).logits)
    assert not torch.allclose(narrow(**inputs).logits, dense(**inputs).logits)
    with pytest.raises(InputError, match="format 'hub': this model belongs to no public family"):
        convert(model(None, preset="bart-base"), cross_attention="WaitK(1)")[0].save_pretrained(
            tmp_path / "hub", format="hub"
        )


def test_a_pattern_in_the_wrong_place_is_one_line():
    with pytest.raises(InputError, match=r"cross_attention: Window\(.*within one sequence"):
        model("Window(3)")
    with pytest.raises(
        InputError, match=r"attention: WaitK.*set it as cross_attention of an encoder-decoder"
    ):
        model(None, attention="WaitK(3)")
    with pytest.raises(InputError, match="cross_attention: only an encoder-decoder attends to a source"):
        create_model("gpt2", cross_attention="WaitK(3)")
    with pytest.raises(InputError, match=r"attention: WaitK\("):
        parse_settings("WaitK(3)", None, None, None)
    config = model("WaitK(3)").config
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_stated_spans_are_read_in_training_steps_and_beams():
    own = model("SourceSpans()")
    source, target = texts(2, 11), texts(2, 6, seed=2)
    mask = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
    first = torch.tensor([[0, 2, 2, 5, 9, 3], [0, 0, 1, 3, 4, 6]])
    spans = torch.stack([first, first + torch.tensor([1, 0, 3, 2, 1, -1])], -1)  # the last sees nothing
    expected = own(source, mask, decoder_input_ids=target, source_spans=spans, output_attentions=True)
    assert expected.cross_attentions is not None
    for row, padding in enumerate((0, 4)):
        for i, line in enumerate(expected.cross_attentions[0][row, 0] > 0):
            seen = range(int(spans[row, i, 0]), int(spans[row, i, 1]) + 1)
            assert line.nonzero().flatten().tolist() == [j + padding for j in seen]
    state, logits = own.encode(source, mask, source_spans=spans), []
    for part in target.split([2, 1, 3], 1):
        output = own(decoder_input_ids=part, state=state)
        state = output.state
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected.logits)
    settings: dict[str, Any] = {"max_new_tokens": 9, "num_beams": 2, "min_new_tokens": 9}
    together = own.generate(source, mask, source_spans=spans, **settings).sequences
    for row, padding in enumerate((0, 4)):  # later positions have the last span
        longer = torch.cat([spans[row : row + 1], spans[row : row + 1, -1:].expand(1, 5, 2)], 1)
        alone = own.generate(source[row : row + 1, padding:], source_spans=longer, **settings).sequences
        assert torch.equal(alone[0], together[row])


def test_a_compiled_step_reads_stated_spans(monkeypatch: pytest.MonkeyPatch):
    prepare_inductor()
    runs: list[int] = []
    compiled = RecordedGraph.compiled
    monkeypatch.setattr(RecordedGraph, "compiled", lambda *inputs: runs.append(1) or compiled(*inputs))
    own, source = model("SourceSpans()"), texts(2, 11)
    spans = torch.tensor([[[0, 1], [2, 4], [8, 10]], [[5, 5], [0, 3], [1, 2]]])
    settings: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}
    outputs = own.generate(source, source_spans=spans, **settings).sequences
    assert torch.equal(own.generate(source, source_spans=spans, compile=True, **settings).sequences, outputs)
    assert runs
    assert not torch.equal(own.generate(source, source_spans=spans.flip(0), **settings).sequences, outputs)


def test_spans_that_nothing_reads_and_missing_spans_are_errors():
    spans, ids = torch.zeros(2, 3, 2, dtype=torch.long), texts(2, 5)
    with pytest.raises(InputError, match=r"source_spans: the pattern SourceSpans\(\) .* reads them"):
        model("SourceSpans()")(ids, decoder_input_ids=ids)
    with pytest.raises(InputError, match=r"source_spans: cross_attention WaitK\(.*set it to SourceSpans"):
        model("WaitK(3)")(ids, decoder_input_ids=ids, source_spans=spans)
    with pytest.raises(InputError, match=r"source_spans: expected the shape \[2, target length, 2\], got"):
        model("SourceSpans()")(ids, decoder_input_ids=ids, source_spans=spans[:1])
    with pytest.raises(InputError, match=r"source_spans: .*a decoder-only model"):
        create_model("decoder-tiny")(ids, source_spans=spans)
