"""Relation labels against their equation, from a dependency tree in text to padding, packing and caches."""

import math

import pytest
import torch
from torch import Tensor

from polyformer.attention.positions import (
    LearnedConfig,
    PositionConfig,
    RelationBiasConfig,
    RelationLabelsConfig,
)
from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig, SpecialTokens
from polyformer.nn.stack import AttentionConfig, StackConfig

LABELS, HEADS, WIDTH, VOCAB = 5, 2, 8, 11
FORMS = [RelationLabelsConfig(num_labels=LABELS), RelationBiasConfig(num_labels=LABELS)]
EACH = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)

TREE = """
1 the     3
2 old     3
3 cat     4
4 slept   0
5 in      7
6 the     7
7 sun     4
"""
"""Token number, word, number of its head (0 for the root)."""

SELF, HEAD, CHILD, SIBLING = range(4)


def tree_relations(text: str) -> Tensor:
    """[1, T, T]: what token j is to token i in a dependency tree; -1 for no near relation."""
    heads = [int(line.split()[2]) - 1 for line in text.split("\n") if line]
    labels = torch.full((1, len(heads), len(heads)), -1)
    for i, head in enumerate(heads):
        for j, other in enumerate(heads):
            if i == j:
                labels[0, i, j] = SELF
            elif head == j:
                labels[0, i, j] = HEAD
            elif other == i:
                labels[0, i, j] = CHILD
            elif head == other:
                labels[0, i, j] = SIBLING
    return labels


def model(position: PositionConfig, shape: str = "encoder") -> Transformer:
    torch.manual_seed(0)
    stack = StackConfig(
        num_hidden_layers=2, attention=AttentionConfig(num_attention_heads=HEADS), position=position
    )
    sides = {"encoder": stack, "decoder": stack} if shape == "pair" else {shape: stack}
    transformer = Transformer(
        ModelConfig(vocab_size=VOCAB, hidden_size=WIDTH, special=SpecialTokens(bos=1), **sides)
    ).double()
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    return transformer.eval()


def random(rows: int, new: int, old: int = 0, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(-1, LABELS, (rows, new, old + new))


def ids_of(rows: int, length: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randint(VOCAB, (rows, length))


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_the_tree_reads_as_it_is_drawn():
    relations = tree_relations(TREE)
    assert relations[0, 0].tolist() == [SELF, SIBLING, HEAD, -1, -1, -1, -1]  # the: old, cat
    assert relations[0, 3].tolist() == [-1, -1, CHILD, SELF, -1, -1, CHILD]  # slept: cat, sun
    assert relations[0, 6].tolist() == [-1, -1, SIBLING, HEAD, CHILD, CHILD, SELF]


@EACH
def test_a_tree_enters_the_scores_as_the_equation_says(form: RelationLabelsConfig):
    """The first layer's attention weights, computed from its projections pair by pair."""
    transformer, ids, relations = model(form), ids_of(1, 7), tree_relations(TREE)
    weights = transformer(ids, relation_ids=relations, output_attentions=True).attentions[0]
    layer, x = transformer.get_submodule("encoder.layers.0.attention"), transformer.tokens(ids)
    q, k = (
        layer.get_submodule(name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in ("query", "key")
    )
    table = transformer.get_parameter("encoder.position.tables.0.weight")
    scores = torch.zeros(HEADS, 7, 7).double()
    for h in range(HEADS):
        for i in range(7):
            for j in range(7):
                label, content = int(relations[0, i, j]), q[0, h, i] @ k[0, h, j]
                if form.kind == "relation_labels":
                    content = content + (q[0, h, i] @ table[label] if label >= 0 else 0)
                scores[h, i, j] = content / math.sqrt(WIDTH / HEADS)
                if form.kind == "relation_bias" and label >= 0:
                    scores[h, i, j] += table[label, h]
    same(weights[0], scores.softmax(-1))


@EACH
def test_no_label_and_no_labels_add_nothing(form: RelationLabelsConfig):
    transformer, ids = model(form), ids_of(2, 6)
    expected = transformer(ids).last_hidden_state
    same(transformer(ids, relation_ids=torch.full((2, 6, 6), -1)).last_hidden_state, expected)
    assert (transformer(ids, relation_ids=random(2, 6)).last_hidden_state - expected).abs().max() > 1e-2


@EACH
def test_every_table_learns_from_the_labels_that_occur(form: RelationLabelsConfig):
    transformer, ids = model(form), ids_of(2, 6)
    relations = random(2, 6).masked_fill(random(2, 6) == 3, -1)
    relations[relations == 2] = 1
    transformer(ids, relation_ids=relations).last_hidden_state.pow(3).sum().backward()
    for name, parameter in transformer.named_parameters():
        if "position.tables" in name:
            assert parameter.grad is not None
            assert parameter.grad[2].abs().max() == 0
            assert parameter.grad[1].abs().max() > 0


@EACH
def test_padding_and_its_labels_change_nothing(form: RelationLabelsConfig):
    transformer, ids, relations = model(form), ids_of(2, 6), random(2, 6)
    expected = transformer(ids, relation_ids=relations).last_hidden_state
    around, mask = random(2, 11, seed=7), torch.zeros(2, 11, dtype=torch.long)
    around[:, 2:8, 2:8], mask[:, 2:8] = relations, 1
    padded = torch.cat([ids[:, :2], ids, ids[:, :3]], 1)
    same(transformer(padded, mask, relation_ids=around).last_hidden_state[:, 2:8], expected)


@EACH
def test_packed_documents_are_as_if_alone(form: RelationLabelsConfig):
    transformer, ids, relations = model(form, "decoder"), ids_of(2, 9), random(2, 9)
    documents = torch.tensor([0] * 4 + [1] * 5).expand(2, -1)
    packed = transformer(ids, document_ids=documents, relation_ids=relations).last_hidden_state
    for part in (slice(0, 4), slice(4, 9)):
        alone = transformer(ids[:, part], relation_ids=relations[:, part, part]).last_hidden_state
        same(packed[:, part], alone)


@EACH
def test_chunks_with_a_cache_are_one_pass(form: RelationLabelsConfig):
    """Each call brings the labels of its new tokens to all tokens so far, left padding included."""
    transformer, ids, relations = model(form, "decoder"), ids_of(2, 9), random(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    expected = transformer(ids, mask, relation_ids=relations).last_hidden_state
    state, done, outputs = transformer.new_state(), 0, []
    for new in (3, 1, 5):
        part, done = slice(done, done + new), done + new
        output = transformer(ids[:, part], mask[:, part], relation_ids=relations[:, part, :done], state=state)
        state = output.state
        outputs.append(output.last_hidden_state)
    same(torch.cat(outputs, 1)[mask.bool()], expected[mask.bool()])


@EACH
def test_both_sides_of_a_pair_take_labels(form: RelationLabelsConfig):
    transformer, source, target = model(form, "pair"), ids_of(2, 7), ids_of(2, 4)
    plain = transformer(source, decoder_input_ids=target).last_hidden_state
    for name, length in (("relation_ids", 7), ("decoder_relation_ids", 4)):
        changed = transformer(source, decoder_input_ids=target, **{name: random(2, length)}).last_hidden_state
        assert (changed - plain).abs().max() > 1e-3


def test_wrong_labels_are_named():
    transformer, ids = model(FORMS[0]), ids_of(2, 6)
    relations = random(2, 6).clamp_min(0)
    for wrong, said in ((LABELS, "got 0 to 5"), (-2, "got -2 to 4")):
        relations[0, 0, 0], relations[0, 0, 1], relations[0, 0, 2] = (
            wrong,
            0,
            min(wrong, 4) if wrong > 0 else 4,
        )
        with pytest.raises(
            InputError, match=f"relation_ids: expected labels from 0 to 4, or -1 for none, {said}"
        ):
            transformer(ids, relation_ids=relations)
    with pytest.raises(
        InputError, match=r"expected integers \[batch, new tokens, tokens so far\] \(2, 6, 6\)"
    ):
        transformer(ids, relation_ids=random(1, 6))
    with pytest.raises(InputError, match=r"\(2, 6, 6\), got torch.float32"):
        transformer(ids, relation_ids=random(2, 6).float())
    with pytest.raises(InputError, match="relation_ids: this model's position scheme takes none"):
        model(LearnedConfig())(ids, relation_ids=random(2, 6))
    with pytest.raises(InputError, match="decoder_relation_ids: an encoder-only model does not take it"):
        transformer(ids, decoder_relation_ids=random(2, 6))
    with pytest.raises(InputError, match="num_labels: expected 1 or more, got 0"):
        RelationLabelsConfig(num_labels=0)
