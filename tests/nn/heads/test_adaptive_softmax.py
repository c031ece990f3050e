"""Adaptive softmax and embeddings: the equation, torch's own, the loss and its gradients, what is tied."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.ops.cross_entropy import Cluster, adaptive_cross_entropy, log_probabilities
from polyformer.models.architectures import Transformer
from polyformer.models.architectures.weights import with_weights
from polyformer.models.presets import model_config
from polyformer.nn.heads import AdaptiveSoftmaxConfig, HeadInput, HeadShape, LanguageModelConfig
from polyformer.nn.stack import AdaptiveConfig, AdaptiveEmbedding

WIDTH, VOCAB = 8, 21
LABELS = torch.tensor([[0, 4, 5, -100, 20, 12, 3], [11, -100, 7, 7, 1, 20, 10]])
CLUSTERS = [
    AdaptiveConfig(cutoffs=(5, 12), div_val=2),
    AdaptiveConfig(cutoffs=(1,), div_val=3, d_embed=9),
    AdaptiveConfig(cutoffs=(5, 12), div_val=1),
    AdaptiveConfig(cutoffs=(5, 12), div_val=1, d_embed=6),
    AdaptiveConfig(div_val=2),
]


def hidden() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*LABELS.shape, WIDTH, dtype=torch.float64, requires_grad=True)


def parts(config: AdaptiveConfig, tied: bool = True, **options: object):
    """A head beside adaptive embeddings, with weights that are all away from zero."""
    torch.manual_seed(0)
    shape = HeadShape(hidden_size=WIDTH, vocab_size=VOCAB, tied=tied, adaptive=config)
    table = AdaptiveEmbedding(config, VOCAB, WIDTH).double()
    head = AdaptiveSoftmaxConfig.from_dict({"kind": "adaptive_softmax", **options}).build(shape).double()
    with torch.no_grad():
        for parameter in (*table.parameters(), *head.parameters()):
            parameter.normal_()
    return head, table


def written_out(head, table: AdaptiveEmbedding, h: Tensor) -> Tensor:
    """log p of every token, token by token, from the equation."""
    config, bounds = table.config, [0, *table.config.cutoffs, VOCAB]
    single = config.div_val == 1
    tables = [t.weight for t in (head.tables if len(head.tables) else table.tables)]

    def logits(i: int, token: int) -> Tensor:
        own = head.projections[str(i)].weight if str(i) in head.projections else None
        if own is None and len(table.projections):
            own = table.projections[0 if single else i].weight
        x = h if own is None else h @ own
        start = 0 if single else bounds[i]
        if token < 0:  # an entry of the head for a cluster
            return x @ head.cluster.weight[-token - 1] + head.cluster.bias[-token - 1]
        row = token - start
        return x @ tables[0 if single else i][row] + head.biases[0 if single else i][row]

    number = len(config.cutoffs)
    first = [logits(0, token) for token in range(bounds[1])] + [logits(0, -i - 1) for i in range(number)]
    normal = torch.stack(first).logsumexp(0)
    result = [x - normal for x in first[: bounds[1]]]
    for i in range(1, number + 1):
        own = [logits(i, token) for token in range(bounds[i], bounds[i + 1])]
        result += [first[bounds[1] + i - 1] - normal + x - torch.stack(own).logsumexp(0) for x in own]
    return torch.stack(result, -1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", CLUSTERS, ids=str)
def test_probabilities_loss_and_gradients_are_those_of_the_equation(config: AdaptiveConfig, tied: bool):
    head, table = parts(config, tied)
    x = hidden()
    loss, predictions = head(HeadInput(x, None, table), LABELS)
    expected = written_out(head, table, x)
    torch.testing.assert_close(predictions(), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(predictions().exp().sum(-1), torch.ones_like(x[..., 0]))
    plain = F.nll_loss(expected.flatten(0, 1), LABELS.flatten())
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)
    learned = [x, *head.parameters(), *table.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(loss, learned, allow_unused=True),
        torch.autograd.grad(plain, learned, allow_unused=True),
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_it_is_torchs_own():
    torch.manual_seed(0)
    theirs = torch.nn.AdaptiveLogSoftmaxWithLoss(
        WIDTH, VOCAB, [5, 12], div_value=2.0, head_bias=True
    ).double()
    clusters = [Cluster(theirs.head.weight, theirs.head.bias)]
    clusters += [Cluster(vectors.weight, None, narrow.weight.t()) for narrow, vectors in theirs.tail]
    x, labels = hidden(), LABELS.masked_fill(LABELS < 0, 2)
    flat = x.flatten(0, 1)
    torch.testing.assert_close(log_probabilities(x, clusters).flatten(0, 1), theirs.log_prob(flat))
    loss, expected = adaptive_cross_entropy(x, clusters, labels), theirs(flat, labels.flatten()).loss
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    learned = [x, *theirs.parameters()]
    for ours, other in zip(torch.autograd.grad(loss, learned), torch.autograd.grad(expected, learned)):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("config", CLUSTERS, ids=str)
def test_embeddings_are_rows_of_the_matrix_written_out(config: AdaptiveConfig):
    _, table = parts(config)
    ids = LABELS.clamp_min(0)
    matrix = table.matrix()
    assert matrix.shape == (VOCAB, WIDTH)
    single = config.div_val == 1
    for token in range(VOCAB):
        i = 0 if single else sum(token >= cutoff for cutoff in config.cutoffs)
        start = 0 if single else [0, *config.cutoffs][i]
        vector = table.tables[i].weight[token - start]
        expected = table.projections[i].weight @ vector if len(table.projections) else vector
        torch.testing.assert_close(matrix[token], expected)
    torch.testing.assert_close(table(ids), matrix[ids])
    learned = list(table.parameters())
    for ours, theirs in zip(
        torch.autograd.grad((table(ids) ** 3).sum(), learned),
        torch.autograd.grad((matrix[ids] ** 3).sum(), learned),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_rare_clusters_are_not_computed_for_frequent_tokens(monkeypatch: pytest.MonkeyPatch):
    """As many rows meet a cluster's vectors as labels lie in it."""
    head, table = parts(AdaptiveConfig(cutoffs=(6, 16), div_val=2))
    seen: list[tuple[int, ...]] = []
    real = torch.nn.functional.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: (seen.append((len(x), len(w))), real(x, w, b))[1])
    head(HeadInput(hidden(), None, table), LABELS)
    for count, inside in ((10, (LABELS > 5) & (LABELS < 16)), (5, LABELS > 15)):
        assert [rows for rows, size in seen if size == count] == [int(inside.sum())]


def test_projections_are_tied_for_each_cluster_as_asked():
    usual, _ = parts(CLUSTERS[0])
    assert [*usual.projections] == ["0"]
    assert [*parts(CLUSTERS[0], tie_projs=[True, False, True])[0].projections] == ["1"]
    assert [*parts(CLUSTERS[2])[0].projections] == []
    assert not [name for name, _ in usual.named_parameters() if name.startswith("tables")]
    with pytest.raises(InputError, match="tie_projs: expected a value for each of 3 clusters, got 1"):
        parts(CLUSTERS[0], tie_projs=[True])


def test_any_model_takes_it():
    config = dataclasses.replace(model_config("gpt2"), vocab_size=VOCAB, hidden_size=16)
    config = config.override("num_attention_heads", 2).override("num_hidden_layers", 1)
    model = Transformer(config.override("head", "adaptive_softmax")).double().eval()
    assert "head.tables.0.weight" not in model.state_dict()  # tied to the plain table
    ids = LABELS.clamp_min(0)
    output = model(ids, labels=ids)
    expected = F.nll_loss(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)
    greedy = model.generate(ids, max_new_tokens=4).sequences
    for step in range(ids.shape[1], greedy.shape[1]):
        assert torch.equal(model(greedy[:, :step]).logits[:, -1].argmax(-1), greedy[:, step])
    rounded = with_weights(model.float(), "int8")
    torch.testing.assert_close(rounded(ids).logits.double(), output.logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cutoffs": (5, 5)}, r"cutoffs: expected increasing numbers from 1, got \[5, 5\]"),
        ({"cutoffs": (0, 5)}, "cutoffs: expected increasing numbers from 1"),
        ({"div_val": 0}, "div_val: expected 1 or more, got 0"),
        ({"d_embed": 0}, "d_embed: expected 1 or more"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], words: str):
    with pytest.raises(InputError, match=words):
        AdaptiveConfig(**options)


def test_what_does_not_fit_the_model_is_named():
    with pytest.raises(InputError, match=r"below vocab_size 21, got \[5, 21\]"):
        parts(AdaptiveConfig(cutoffs=(5, 21)))
    with pytest.raises(InputError, match="gives the vectors of cluster 2 no channel"):
        parts(AdaptiveConfig(cutoffs=(5, 12), div_val=4))
    shape = HeadShape(hidden_size=WIDTH, vocab_size=VOCAB, adaptive=CLUSTERS[0])
    with pytest.raises(InputError, match="use the head 'adaptive_softmax'"):
        LanguageModelConfig().build(shape)
    with pytest.raises(InputError, match="clusters: tied to embeddings with"):
        AdaptiveSoftmaxConfig(clusters=CLUSTERS[1]).build(shape)
    with pytest.raises(InputError, match="a plain table are 8 wide in all of them, expected div_val 1"):
        AdaptiveSoftmaxConfig(clusters=CLUSTERS[0]).build(HeadShape(hidden_size=WIDTH, vocab_size=VOCAB))
