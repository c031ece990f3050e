"""Baselines and variants that claims compare: ensembles, recurrent models, layers without a part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyformer.core.host_values import next_labels
from polyformer.core.ops.norms import LayerNormConfig
from polyformer.models.presets import create_model
from polyformer.training.recipes.fit import Fitted
from polyformer_lab.cells import Cell
from polyformer_lab.layers import NoNormConfig, PlainBlockConfig, RecurrentWriter
from polyformer_lab.measures.compute import sliding_cost
from polyformer_lab.measures.scores import Ensemble, learned_spans
from polyformer_lab.measures.strings import writer_of

SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 20}


@torch.no_grad()
def test_an_ensemble_mixes_probabilities_within_documents():
    torch.manual_seed(0)
    models = [create_model("decoder-tiny", **SIZES, initializer_range=0.5).eval() for _ in range(2)]
    ids, documents = torch.randint(0, 20, (2, 7)), torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * 2)
    batch = {"input_ids": ids, "labels": ids, "document_ids": documents}
    same = float(Ensemble([models[0]] * 3)(**batch).loss)
    assert same == pytest.approx(float(models[0](**batch).loss), rel=1e-5)
    mixed = sum(model(input_ids=ids, document_ids=documents).logits.softmax(-1) for model in models) / 2
    targets = next_labels(ids, documents)
    assert (targets == -100).sum() == 4
    own = torch.nn.functional.cross_entropy(torch.log(torch.as_tensor(mixed)).mT, targets)
    assert float(Ensemble(models)(**batch).loss) == pytest.approx(float(own), rel=1e-5)


def test_only_attention_reads_more_than_the_last_states():
    torch.manual_seed(0)
    source, target = torch.randint(4, 14, (2, 6)), torch.randint(4, 14, (2, 5))
    for attention in (False, True):
        writer = writer_of({"preset": "recurrent", "hidden_size": 8, "attention": attention})
        assert isinstance(writer, RecurrentWriter)
        output = writer(source, target, torch.tensor(0))
        assert output.logits.shape == (2, 5, 14)
        later = target.clone()
        later[:, -1] = 4  # the last target is not read
        assert torch.equal(writer(source, later, torch.tensor(0)).logits, output.logits)
        assert ("query.weight" in dict(writer.named_parameters())) == attention


def test_layers_without_a_part():
    x = torch.randn(2, 3, 8)
    block = PlainBlockConfig().build(8, 2, LayerNormConfig(), 0.0)
    norms = block.norms
    torch.testing.assert_close(block(x, [torch.sin, torch.cos]), norms[1](norms[0](x).sin()).cos())
    assert torch.equal(NoNormConfig().build(8)(x), x)


def test_spans_by_layer(tmp_path: Path):
    model = create_model("decoder-tiny", **SIZES, attention="adaptive_span(max_span=16, initial=0.5)")
    cell = Cell((), None, tmp_path, None, "learned-spans", {})
    unused: Any = None
    vars(cell)["fitted"] = Fitted(unused, unused, unused, model, unused, {})
    assert list(learned_spans(cell)) == [{"layer": n, "span": 8.0, "longest": 8.0} for n in (1, 2)]


def test_the_factor_is_of_the_times_per_token(tmp_path: Path):
    cell = Cell((), None, tmp_path, None, "sliding-cost", {})
    model = {"preset": "decoder-tiny", **SIZES, "position": "none"}
    (row,) = sliding_cost(cell, [16], model, 1)
    assert row["factor"] == pytest.approx(row["sliding_ms"] / row["memory_ms"])
