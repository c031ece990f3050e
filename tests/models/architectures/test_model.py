"""The model as a whole: losses, what can be asked for, tied tables, and what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.config import ModelConfig
from polyformer.models.presets import create_model
from polyformer.nn.heads import ClassifyConfig, TagConfig

VOCAB = 31
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}


def tiny(name: str, **overrides: Any) -> Transformer:
    torch.manual_seed(0)
    return create_model(name, **{**TINY, **overrides}).double().eval()


def ids(rows: int, length: int, seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length))


def same(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def test_a_decoder_predicts_the_next_token():
    model, x = tiny("gpt2"), ids(2, 7)
    labels = x.clone()
    labels[0, 3] = -100
    output = model(x, labels=labels)
    same(output.loss, mean_loss(output.logits[:, :-1], labels[:, 1:]))


def test_nothing_is_predicted_across_documents():
    model, x = tiny("gpt2"), ids(1, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    alone = [model(part, labels=part) for part in x.split([3, 2, 2], 1)]
    terms = torch.stack([output.loss * count for output, count in zip(alone, (2, 1, 1))])
    same(model(x, document_ids=documents, labels=x).loss, terms.sum() / 4)


@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 2), (2, 1)])
def test_padding_is_no_part_of_the_loss(before: int, after: int):
    """Neither predicted nor predicting, whatever its labels say."""
    model, x = tiny("gpt2"), ids(2, 6)
    expected = model(x, labels=x).loss
    padded = F.pad(x, (before, after), value=5)
    mask = F.pad(torch.ones_like(x), (before, after))
    same(model(padded, attention_mask=mask, labels=padded).loss, expected)
    same(model(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100)).loss, expected)


def test_a_pair_predicts_its_labels_from_those_before():
    model, source, labels = tiny("transformer-base"), ids(2, 9), ids(2, 5, seed=2)
    labels[1, 3:] = -100
    output = model(source, labels=labels)
    start = torch.full((2, 1), 1)
    shifted = torch.cat([start, labels[:, :-1].clamp_min(0)], 1)
    expected = model(source, decoder_input_ids=shifted, labels=labels)
    same(output.logits, expected.logits)
    same(output.loss, mean_loss(output.logits, labels))


def test_labels_of_other_heads_are_not_shifted():
    """In a decoder too: a class of the text, a tag of each token."""
    x = ids(2, 6)
    model = tiny("gpt2", head=ClassifyConfig(num_labels=3, pooling="last"))
    labels = torch.tensor([2, 0])
    output = model(x, labels=labels)
    assert output.logits.shape == (2, 3)
    same(output.loss, mean_loss(output.logits, labels))
    model, labels = tiny("gpt2", head=TagConfig(num_labels=3)), torch.randint(3, (2, 6))
    output = model(x, labels=labels)
    same(output.loss, mean_loss(output.logits, labels))


def test_the_loss_is_the_mean_over_labelled_tokens():
    model, x = tiny("bert-base"), ids(2, 6)
    labels = torch.full_like(x, -100)
    labels[0, 2], labels[1, 1], labels[1, 5] = 4, 9, 0
    output = model(x, labels=labels)
    same(output.loss, mean_loss(output.logits, labels))
    assert model(x, labels=torch.full_like(x, -100)).loss == 0


MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("name", ["gpt2", "bert-base"])
def test_attentions_are_probabilities(name: str):
    model = tiny(name)
    attentions = model(ids(2, 7), attention_mask=MASK, output_attentions=True).attentions
    assert len(attentions) == 2
    for attention in attentions:
        assert attention.shape == (2, 3, 7, 7)
        same(attention.sum(-1), torch.ones(2, 3, 7).double())
        assert (attention[0, :, :, 5:] == 0).all()
        if name == "gpt2":
            assert (attention.triu(1) == 0).all()
    assert model(ids(2, 7)).attentions is None


def test_attentions_of_a_pair_are_in_three_places():
    model = tiny("transformer-base")
    output = model(ids(2, 7), attention_mask=MASK, decoder_input_ids=ids(2, 4), output_attentions=True)
    for attentions, shape in (
        (output.attentions, (4, 4)),
        (output.cross_attentions, (4, 7)),
        (output.encoder_attentions, (7, 7)),
    ):
        assert len(attentions) == 2
        for attention in attentions:
            assert attention.shape == (2, 3, *shape)
            same(attention.sum(-1), torch.ones(2, 3, shape[0]).double())
    assert (output.cross_attentions[0][0, :, :, 5:] == 0).all()
    assert (output.attentions[0].triu(1) == 0).all()


def test_looking_at_attentions_changes_nothing():
    model, x = tiny("gpt2"), ids(2, 7)
    same(model(x, output_attentions=True).logits, model(x).logits)


def test_hidden_states_are_every_layers_input_and_the_output():
    model = tiny("transformer-base")
    output = model(ids(2, 7), decoder_input_ids=ids(2, 4), output_hidden_states=True)
    assert [tuple(tensor.shape) for tensor in output.hidden_states] == [(2, 4, 12)] * 3
    assert [tuple(tensor.shape) for tensor in output.encoder_hidden_states] == [(2, 7, 12)] * 3
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)
    assert torch.equal(output.encoder_hidden_states[-1], output.encoder_last_hidden_state)
    assert model(ids(2, 7), decoder_input_ids=ids(2, 4)).hidden_states is None


def test_recomputing_gives_equal_gradients():
    x, grads = ids(2, 7), []
    for recompute in (False, True):
        model = tiny("gpt2", dropout=0.2).train()
        assert model.decoder is not None
        model.decoder.recompute = recompute
        torch.manual_seed(3)
        model(x, labels=x).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def names(model: Transformer) -> set[str]:
    return {name for name in model.state_dict() if "tokens" in name or name.startswith("head")}


def test_tied_tables_are_one_tensor():
    """The paper's three-way tie: source, target and output; each freed of it by an option."""
    assert names(tiny("transformer-base")) == {"tokens.weight"}
    assert names(tiny("transformer-base", tied=False)) == {"tokens.weight", "head.weight"}
    assert names(tiny("transformer-base", shared=False)) == {"tokens.weight", "decoder_tokens.weight"}
    model = tiny("transformer-base")
    memory = [tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()]
    assert len(set(memory)) == len(memory)
    model(ids(1, 5), labels=ids(1, 4)).loss.backward()
    assert model.tokens.weight.grad is not None
    assert (model.tokens.weight.grad.abs().sum(1) > 0).all()


def test_an_unshared_output_reads_the_decoders_table():
    model = tiny("transformer-base", shared=False)
    assert model.decoder_tokens is not None
    output = model(ids(1, 5), decoder_input_ids=ids(1, 4))
    same(output.logits, output.last_hidden_state @ model.decoder_tokens.weight.T)


def test_the_names_of_a_layers_tensors():
    """Files depend on them."""
    layer = {
        name.split("layers.0.")[1]
        for name in tiny("transformer-base").state_dict()
        if "decoder.layers.0." in name
    }
    heads = {
        f"{side}.{part}"
        for side in ("attention", "cross_attention")
        for part in ("query", "key", "value", "output")
    }
    parts = {*heads, "feedforward.up", "feedforward.down", "block.norms.0", "block.norms.1", "block.norms.2"}
    assert layer == {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}


def test_positions_beyond_the_table_are_refused_while_decoding_too():
    model = tiny("gpt2")
    message = "input of 21 tokens: longer than the 20 learned positions"
    with pytest.raises(InputError, match=message):
        model(ids(1, 21))
    state = model(ids(1, 20), use_cache=True).state
    with pytest.raises(InputError, match=message):
        model(ids(1, 1), state=state)
    assert tiny("gpt2", position="sinusoidal")(ids(1, 50)).logits.shape == (1, 50, VOCAB)


def test_token_types_matter():
    model, x = tiny("bert-base"), ids(1, 5)
    zeros = torch.zeros_like(x)
    assert torch.equal(model(x).logits, model(x, token_type_ids=zeros).logits)
    assert not torch.equal(model(x).logits, model(x, token_type_ids=zeros + 1).logits)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {}, "input_ids: expected token ids [batch, length], got None"),
        (
            "gpt2",
            {"input_ids": torch.ones(2, 3)},
            "input_ids: expected integer ids [batch, length], got torch.float32 (2, 3)",
        ),
        (
            "gpt2",
            {"input_ids": ids(1, 3)[0]},
            "input_ids: expected integer ids [batch, length], got torch.int64 (3,)",
        ),
        (
            "gpt2",
            {"input_ids": torch.tensor([[3, VOCAB]])},
            "input_ids: expected ids from 0 to 30, got 3 to 31",
        ),
        ("gpt2", {"input_ids": torch.tensor([[-1, 2]])}, "input_ids: expected ids from 0 to 30, got -1 to 2"),
        (
            "gpt2",
            {"input_ids": ids(1, 3), "decoder_input_ids": ids(1, 3)},
            "decoder_input_ids: a decoder-only model does not take it; leave it out",
        ),
        (
            "gpt2",
            {"input_ids": ids(1, 3), "decoder_attention_mask": ids(1, 3)},
            "decoder_attention_mask: a decoder-only model does not take it; leave it out",
        ),
        (
            "gpt2",
            {"input_ids": ids(1, 3), "attention_mask": torch.zeros(1, 2)},
            "attention_mask: expected the shape (1, 3), got (1, 2)",
        ),
        (
            "gpt2",
            {"input_ids": ids(1, 3), "token_type_ids": ids(1, 3)},
            "token_type_ids: this model has none (embedding.type_vocab_size is 0); leave them out",
        ),
        (
            "bert-base",
            {"input_ids": ids(1, 3), "decoder_input_ids": ids(1, 3)},
            "decoder_input_ids: an encoder-only model does not take it; leave it out",
        ),
        (
            "bert-base",
            {"input_ids": ids(1, 3), "use_cache": True},
            "use_cache: an encoder-only model does not take it; leave it out",
        ),
        (
            "bert-base",
            {"input_ids": ids(1, 3), "token_type_ids": torch.tensor([[0, 1, 2]])},
            "token_type_ids: expected numbers from 0 to 1, got 0 to 2",
        ),
        (
            "gpt2",
            {"input_ids": ids(1, 3), "labels": ids(1, 4)},
            "labels: expected the shape (1, 3), got (1, 4)",
        ),
        (
            "bert-base",
            {"input_ids": ids(1, 3), "labels": torch.tensor([[0, -100, VOCAB]])},
            "labels: expected numbers from 0 to 30, or -100, got 0 to 31",
        ),
        (
            "gpt2",  # which shifts labels: nothing predicts the first one
            {"input_ids": ids(1, 3), "labels": torch.tensor([[VOCAB, 0, 0]])},
            "labels: expected numbers from 0 to 30, or -100, got 0 to 31",
        ),
        (
            "encoder-tiny",
            {"input_ids": ids(1, 3), "labels": torch.tensor([2])},
            "labels: expected numbers from 0 to 1, or -100, got 2 to 2",
        ),
        (
            "encoder-tiny",
            {"input_ids": ids(1, 3), "labels": torch.tensor([[1]])},
            "labels: expected the shape (1,), got (1, 1)",
        ),
        (
            "transformer-base",
            {"input_ids": ids(1, 3), "labels": ids(1, 3), "document_ids": ids(1, 3)},
            "document_ids: an encoder-decoder does not take it; leave it out",
        ),
        (
            "transformer-base",
            {"input_ids": ids(1, 3)},
            "decoder_input_ids or labels: an encoder-decoder needs one of them",
        ),
        (
            "transformer-base",
            {"input_ids": ids(1, 3), "decoder_input_ids": torch.tensor([[99]])},
            "decoder_input_ids: expected ids from 0 to 30, got 99 to 99",
        ),
    ],
)
def test_what_does_not_fit_is_named(name: str, options: dict[str, Any], message: str):
    with pytest.raises(InputError) as caught:
        tiny(name)(**options)
    assert str(caught.value) == message


def test_a_pair_without_a_first_token_says_so():
    model = tiny("transformer-base", bos=None)
    with pytest.raises(InputError, match=r"special\.bos: an encoder-decoder needs a start token"):
        model(ids(1, 3), labels=ids(1, 3))


def test_configurations_that_make_no_model_are_refused():
    with pytest.raises(InputError, match="encoder, decoder: expected at least one of them"):
        ModelConfig(vocab_size=3)
    for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
        with pytest.raises(InputError, match=f"{name}: expected 1 or more, got 0"):
            tiny("gpt2", **{name: 0})
    with pytest.raises(InputError, match="num_attention_heads: expected a divisor of hidden_size 12, got 5"):
        tiny("gpt2", num_attention_heads=5)
