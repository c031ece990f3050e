"""Heads with labels of their own: sequences, tokens, spans, vectors."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.nn.heads import (
    ClassifyConfig,
    DetectConfig,
    DistilledConfig,
    EmbedConfig,
    Head,
    HeadConfig,
    HeadInput,
    HeadShape,
    SpanConfig,
    TagConfig,
)

WIDTH = 4
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()


def build(config: HeadConfig) -> Head:
    torch.manual_seed(0)
    return config.build(HeadShape(hidden_size=WIDTH, vocab_size=7)).double().eval()


def inputs() -> HeadInput:
    torch.manual_seed(1)
    return HeadInput(torch.randn(2, 5, WIDTH).double(), MASK, torch.randn(7, WIDTH).double())


def same(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hidden", [True, False])
def test_classify(hidden: bool):
    head, batch, labels = build(ClassifyConfig(num_labels=3, hidden=hidden)), inputs(), torch.tensor([2, 0])
    loss, predictions = head(batch, labels)
    first = torch.stack([batch.hidden[0, 0], batch.hidden[1, 1]])
    if hidden:
        first = torch.tanh(first @ head.dense.weight.T + head.dense.bias)
    logits = first @ head.output.weight.T + head.output.bias
    same(predictions(), logits)
    same(loss, F.cross_entropy(logits, labels))


@pytest.mark.parametrize("masked", [True, False])
def test_two_classifiers_of_the_first_two_tokens(masked: bool):
    head, batch, labels = build(DistilledConfig(num_labels=3)), inputs(), torch.tensor([2, 0])
    batch = batch if masked else dataclasses.replace(batch, mask=None)
    loss, predictions = head(batch, labels)
    start = int(masked)  # where the second text begins
    of_class, of_distillation = (
        torch.stack([batch.hidden[0, i], batch.hidden[1, start + i]]) @ layer.weight.T + layer.bias
        for i, layer in enumerate((head.output, head.distilled))
    )
    same(predictions(), (of_class + of_distillation) / 2)
    same(loss, (F.cross_entropy(of_class, labels) + F.cross_entropy(of_distillation, labels)) / 2)


def test_tag():
    head, batch = build(TagConfig(num_labels=3)), inputs()
    labels = torch.tensor([[0, -100, 2, -100, -100], [-100, 1, 1, 2, -100]])
    loss, predictions = head(batch, labels)
    logits = batch.hidden @ head.output.weight.T + head.output.bias
    same(predictions(), logits)
    same(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_span():
    """Start and end are each a choice among the real tokens."""
    head, batch, labels = build(SpanConfig()), inputs(), torch.tensor([[0, 2], [1, -100]])
    loss, predictions = head(batch, labels)
    logits = batch.hidden @ head.output.weight.T + head.output.bias
    same(predictions()[MASK], logits[MASK])
    assert (predictions()[~MASK] == -torch.inf).all()
    start, end = logits.masked_fill(~MASK.unsqueeze(-1), -torch.inf).unbind(-1)
    terms = F.cross_entropy(start[:1], labels[:1, 0]), F.cross_entropy(end[:1], labels[:1, 1])
    terms += (F.cross_entropy(start[1:], labels[1:, 0]),)
    same(loss, torch.stack(terms).mean())


def test_a_span_in_a_row_of_padding_leaves_other_gradients_finite():
    head = build(SpanConfig())
    hidden = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]]).bool()
    loss, _ = head(HeadInput(hidden, mask, hidden), torch.tensor([[0, 1], [-100, -100]]))
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("normalize", [True, False])
def test_embed(normalize: bool):
    batch = inputs()
    loss, predictions = build(EmbedConfig(normalize=normalize))(batch, None)
    mean = torch.stack([batch.hidden[0, :3].mean(0), batch.hidden[1, 1:].mean(0)])
    same(predictions(), mean / mean.norm(dim=1, keepdim=True) if normalize else mean)
    assert loss is None


def test_labels_of_nothing_give_a_loss_of_zero():
    head = build(TagConfig(num_labels=3))
    loss, _ = head(inputs(), torch.full((2, 5), -100))
    assert loss == 0
    assert all(grad.abs().max() == 0 for grad in torch.autograd.grad(loss, list(head.parameters())))


def test_dropout_is_active_in_training_alone():
    for config in (ClassifyConfig(dropout=0.5), TagConfig(dropout=0.5)):
        head, batch = build(config), inputs()
        assert torch.equal(head(batch, None)[1](), head(batch, None)[1]())
        head.train()
        assert not torch.equal(head(batch, None)[1](), head(batch, None)[1]())


def test_what_is_wrong_is_named():
    with pytest.raises(InputError, match="num_labels: expected 1 or more, got 0"):
        TagConfig(num_labels=0)
    with pytest.raises(InputError, match="num_labels: expected 1 or more, got -1"):
        ClassifyConfig(num_labels=-1)
    with pytest.raises(InputError, match="unknown pooling 'fist': did you mean 'first'"):
        ClassifyConfig(pooling="fist")
    with pytest.raises(InputError, match="unknown pooling 'sum'"):
        EmbedConfig(pooling="sum")
    with pytest.raises(InputError, match="labels: the head 'embed' has no loss; leave labels out"):
        build(EmbedConfig())(inputs(), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    "config",
    [ClassifyConfig(num_labels=3), DistilledConfig(num_labels=3), TagConfig(num_labels=3), SpanConfig()],
)
def test_example_labels_fit(config: HeadConfig):
    labels = config.example_labels(2, 5, 7)
    assert labels is not None
    batch = inputs()
    loss, _ = build(config)(HeadInput(batch.hidden, None, batch.table), labels)
    assert loss is not None
    assert loss.isfinite()


@pytest.mark.parametrize("problem", [None, "multi_label"])
def test_several_labels_of_a_text(problem: str | None):
    """The mean over texts and labels of -log of the share that the logit gives to what holds."""
    head, batch = build(ClassifyConfig(num_labels=3, problem=problem)), inputs()
    labels = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    loss, predictions = head(batch, labels)
    share = predictions().sigmoid()
    same(loss, -torch.where(labels == 1, share, 1 - share).log().mean())


@pytest.mark.parametrize(("problem", "num_labels"), [(None, 1), ("regression", 1), ("regression", 3)])
def test_numbers_of_a_text(problem: str | None, num_labels: int):
    head, batch = build(ClassifyConfig(num_labels=num_labels, problem=problem)), inputs()
    labels = torch.arange(2 * num_labels).reshape(2, num_labels) / 3
    loss, predictions = head(batch, labels)
    same(loss, ((predictions() - labels) ** 2).mean())
    if num_labels == 1:
        same(head(batch, labels.squeeze(1))[0], loss)


@pytest.mark.parametrize(
    ("problem", "labels", "message"),
    [
        ("single", [0, 1], "unknown problem 'single': did you mean"),
        ("multi_label", [0, 1], "labels: expected the shape (2, 3) of a problem 'multi_label', got (2,)"),
        ("multi_label", [[0, 2, 0]] * 2, "labels: expected 0 or 1 for each of several labels, got 0 to 2"),
        ("regression", [0.5, 1.0], "labels: expected the shape (2, 3) of a problem 'regression', got (2,)"),
    ],
)
def test_labels_of_another_problem_are_refused(problem: str, labels: list[float], message: str):
    with pytest.raises(InputError) as caught:
        build(ClassifyConfig(num_labels=3, problem=problem))(inputs(), torch.tensor(labels))
    assert str(caught.value).startswith(message)


def test_dropout_before_the_hidden_layer_too():
    """With all weights one and no activation that bends, what is dropped shows in the number of logits."""
    torch.manual_seed(0)
    seen = {}
    for twice in (False, True):
        head = build(ClassifyConfig(num_labels=2, activation="relu", dropout=0.5, drops_twice=twice)).train()
        with torch.no_grad():
            head.dense.weight.copy_(torch.eye(WIDTH))
            head.dense.bias.zero_()
            head.output.weight.fill_(1.0)
            head.output.bias.zero_()
        rows = HeadInput(torch.ones(4000, 1, WIDTH).double(), None, torch.zeros(1))
        seen[twice] = set(head(rows, None)[1]()[:, 0].tolist())
    assert seen == {False: {0.0, 2.0, 4.0, 6.0, 8.0}, True: {0.0, 4.0, 8.0, 12.0, 16.0}}


def test_detect():
    """The mean over real tokens that have a label."""
    head, batch = build(DetectConfig(activation="relu")), inputs()
    labels = torch.tensor([[0, 1, -100, 1, 1], [0, 0, 1, 0, 1]])
    loss, predictions = head(batch, labels)
    hidden = torch.relu(batch.hidden @ head.dense.weight.T + head.dense.bias)
    logits = (hidden @ head.output.weight.T + head.output.bias)[..., 0]
    same(predictions(), logits)
    share = logits.sigmoid()
    terms = -torch.where(labels == 1, share, 1 - share).log()
    same(loss, terms[MASK & (labels != -100)].mean())


def test_a_text_is_read_where_its_last_end_token_stands():
    head, batch = build(ClassifyConfig(end_token=6)), inputs()
    ids = torch.tensor([[1, 6, 6, 3, 0], [6, 2, 2, 2, 2]])
    at_ends = torch.stack([batch.hidden[0, 2], batch.hidden[1, 0]])
    expected = head.output(torch.tanh(head.dense(at_ends)))
    same(head(dataclasses.replace(batch, ids=ids), None)[1](), expected)
    with pytest.raises(InputError, match="input_ids: a text has no token 6, which this head pools"):
        head(dataclasses.replace(batch, ids=ids.clamp_max(5)), None)
    for other in (None, ids[:, :4]):
        with pytest.raises(InputError, match=r"last token 6 of each text .* the shape \(2, 5\)"):
            head(dataclasses.replace(batch, ids=other), None)


def test_span_dropout_is_of_training_alone():
    head, batch = build(SpanConfig(span_dropout=0.5)), inputs()
    whole = head(batch, None)[1]()
    same(build(SpanConfig())(batch, None)[1]()[MASK], whole[MASK])
    assert not torch.equal(head.train()(batch, None)[1]()[MASK], whole[MASK])
