"""Parts that predict further tokens beside their equations: outputs, losses, gradients, what is refused."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer import InputError, create_model, from_pretrained
from polyformer.core.sequence.context import Context
from polyformer.models.architectures.transformer import DraftingTransformer
from polyformer.models.checkpoints import start_from
from polyformer.training.distributed.pipeline_stages import check_pipelined
from polyformer.training.distributed.tensor_parallel import check_tensor_parallel

VOCAB, LENGTH = 13, 9
KINDS = ["medusa(heads=3, decay=0.5, weight=0.7)", "multi_token(modules=3, weight=0.9)"]


SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 12, "num_attention_heads": 2, "intermediate_size": 20},
    **{"dropout": 0.0, "initializer_range": 0.5},
}


def model(drafting: str, **options: Any) -> Any:
    torch.manual_seed(0)
    built = create_model("decoder-tiny", **SIZES, drafting=drafting, **options)
    assert isinstance(built, DraftingTransformer)
    if drafting.startswith("medusa"):
        torch.nn.init.normal_(built.drafting.get_parameter("residual"), 0.0, 0.5)
    return built.double()


def text() -> dict[str, Tensor]:
    """A row of three documents, of 4, 1 and 4 tokens, and a row padded on both sides."""
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0, 0, 0, 0, 1, 2, 2, 2, 2], [0] * LENGTH])
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[1, -1:] = 0
    return {"input_ids": ids, "attention_mask": mask, "document_ids": documents}


def medusa_ahead(built: Any, ids: Tensor) -> list[Tensor]:
    """p_k's logits [T, V] of a text [T], one token after another."""
    hidden, parts = built(ids.view(1, -1)).last_hidden_state[0], built.drafting
    return [
        torch.stack([last.weight @ (h + F.silu(first @ h)) for h in hidden])
        for first, last in zip(parts.residual, parts.outputs)
    ]


def multi_token_ahead(built: Any, ids: Tensor) -> list[Tensor]:
    """p_k's logits [T - k, V] of a text [T], each token from the text up to it alone."""
    hidden, vectors, logits = built(ids.view(1, -1)).last_hidden_state[0], built.tokens.weight[ids], []
    for ahead, part in enumerate(built.drafting.parts, 1):
        inputs, outputs = [], []
        for t in range(len(ids) - ahead):
            pair = part.hidden_norm(hidden[t]), part.token_norm(vectors[t + ahead])
            inputs.append(part.joint.weight @ torch.cat(pair))
            pos = torch.arange(t + 1)
            x = part.stack.position.embed(torch.stack(inputs).unsqueeze(0), pos, 0)
            outputs.append(part.stack(x, pos, Context.of_lengths(t + 1, t + 1, True))[0][0, -1])
        hidden = torch.stack(outputs) if outputs else hidden[:0]
        logits.append(built.predictions(hidden.unsqueeze(0))[0])
    return logits


def plain_loss(built: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of the further tokens, text by text."""
    config, terms = built.drafting.config, [[] for _ in range(built.drafting.count)]
    ahead = medusa_ahead if config.kind == "medusa" else multi_token_ahead
    for ids, mask, documents in zip(*batch.values()):
        for number in documents.unique():
            own = ids[(documents == number) & mask.bool()]
            for k, logits in enumerate(ahead(built, own)):
                targets = own[k + 2 :]
                terms[k] += F.cross_entropy(logits[: len(targets)], targets, reduction="none").unbind()
    means = torch.stack([torch.stack(own).mean() for own in terms])
    if config.kind == "multi_token":
        return config.weight / len(means) * means.sum()
    return config.weight * sum(config.decay**k * mean for k, mean in enumerate(means, 1))


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("drafting", KINDS)
def test_the_loss_is_that_of_the_equation_text_by_text(drafting: str, position: str):
    """Values and gradients, with documents, padding on both sides and texts shorter than the drafts."""
    built, batch = model(drafting, position=position, tied=False).train(), text()
    bare = create_model("decoder-tiny", **SIZES, position=position, tied=False).double().train()
    bare.load_state_dict({name: x for name, x in built.state_dict().items() if "drafting" not in name})
    head, got = (each(**batch, labels=batch["input_ids"]) for each in (bare, built))
    expected = plain_loss(built, batch)
    torch.testing.assert_close(got.losses["prediction"], head.loss)
    torch.testing.assert_close(got.losses["drafting"], expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.loss, head.loss + expected, rtol=1e-9, atol=1e-9)
    names, parameters = zip(*built.named_parameters())
    plain = torch.autograd.grad(expected, parameters, allow_unused=True)
    of_head = dict(zip(dict(bare.named_parameters()), torch.autograd.grad(head.loss, [*bare.parameters()])))
    for name, own, other in zip(names, torch.autograd.grad(got.loss, parameters), plain):
        whole = of_head.get(name, 0) + (0 if other is None else other)
        torch.testing.assert_close(own, whole, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.parametrize("drafting", KINDS)
def test_evaluation_and_a_model_without_labels_know_nothing_of_it(drafting: str):
    built, batch = model(drafting).eval(), text()
    got = built(**batch, labels=batch["input_ids"])
    assert got.losses.keys() == {"prediction"}
    assert torch.equal(got.loss, got.losses["prediction"])
    assert built.train()(**batch).loss is None


def test_heads_that_begin_predict_what_the_head_does():
    for tied in (True, False):
        built = model(KINDS[0], tied=tied).eval()
        built.start_drafting()
        hidden = built(text()["input_ids"]).last_hidden_state
        for logits in built.drafting(hidden):
            torch.testing.assert_close(logits, built.predictions(hidden))


def test_heads_of_a_trained_model_begin_as_its_head(tmp_path: Path):
    for tied in (True, False):
        plain = create_model("decoder-tiny", **SIZES, tied=tied)
        plain.save_pretrained(tmp_path / str(tied))
        built = model("medusa", tied=tied)
        report = start_from(tmp_path / str(tied), built)
        assert {name.partition(".")[0] for name in report.newly_initialized} == {"drafting"}
        hidden = built.eval()(text()["input_ids"]).last_hidden_state
        torch.testing.assert_close(built.drafting(hidden)[3], built.predictions(hidden))


@pytest.mark.parametrize("drafting", ["medusa(alone=true)", "multi_token(alone=true)"])
def test_alone_the_parts_are_trained_and_the_model_is_not(drafting: str, tmp_path: Path):
    built, batch = model(drafting).train(), text()
    built(**batch, labels=batch["input_ids"]).loss.backward()
    trained = {name for name, parameter in built.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in built.named_parameters() if name.startswith("drafting.")}
    built.save_pretrained(tmp_path)
    flags = {name: parameter.requires_grad for name, parameter in built.named_parameters()}
    loaded = from_pretrained(tmp_path)
    assert flags == {name: parameter.requires_grad for name, parameter in loaded.named_parameters()}


@pytest.mark.parametrize("drafting", KINDS)
def test_files_copies_and_pickles_are_the_same_model(drafting: str, tmp_path: Path):
    built, ids = model(drafting).eval(), text()["input_ids"]
    built.save_pretrained(tmp_path)
    expected = built.generate(ids, max_new_tokens=6, draft="self")
    for other in (from_pretrained(tmp_path), copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert isinstance(other, DraftingTransformer)
        assert other.config.drafting == built.config.drafting
        got = other.generate(ids, max_new_tokens=6, draft="self")
        assert torch.equal(got.sequences, expected.sequences)
        assert got.drafted == expected.drafted


def test_weights_of_eight_bits_draft_too(tmp_path: Path):
    for drafting in KINDS:
        model(drafting).float().save_pretrained(tmp_path / drafting[:5])
        small = from_pretrained(tmp_path / drafting[:5], weights="int8")
        ids = text()["input_ids"]
        got = small.generate(ids, max_new_tokens=6, draft="self")
        assert torch.equal(got.sequences, small.generate(ids, max_new_tokens=6).sequences)
        small.save_pretrained(tmp_path / "int8")
        assert isinstance(from_pretrained(tmp_path / "int8"), DraftingTransformer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "encoder-tiny"}, "drafting: an encoder generates no text, expected null, got 'medusa'"),
        (
            {"head": "tag(num_labels=3)"},
            "drafting: it drafts what the head verifies, and 'tag' predicts no next",
        ),
        ({"drafting": "multi_token", "preset": "transformer-tiny"}, "which an encoder does not allow"),
        (
            {"drafting": "multi_token", "memory": "recurrent", "position": "transformer_xl"},
            "memory 'recurrent'",
        ),
        ({"drafting": "multi_token", "depth": "act"}, "depth 'act' does not allow; use 'medusa'"),
        ({"drafting": "multi_token", "value_residual": True}, "value_residual does not allow"),
        ({"drafting": "multi_token", "norm": "batch"}, "norm 'batch' does not allow"),
        ({"drafting": "medusa(heads=0)"}, "heads: expected 1 or more, got 0"),
        ({"drafting": "medusa(decay=2.0)"}, "decay: expected a share in"),
    ],
)
def test_what_cannot_be_built_is_refused(options: dict[str, object], message: str):
    preset = options.get("preset", "decoder-tiny")
    more = {"drafting": "medusa", **{name: x for name, x in options.items() if name != "preset"}}
    with pytest.raises(InputError, match=message):
        create_model(str(preset), vocab_size=VOCAB, **more)


def test_a_loss_over_a_part_of_the_text_is_refused():
    built, batch = model(KINDS[1]).train(), text()
    state = built(batch["input_ids"], use_cache=True).state
    with pytest.raises(InputError, match="drafting: its loss is of whole texts, read in one call"):
        built(batch["input_ids"], labels=batch["input_ids"], state=state)
    vectors = torch.randn(2, LENGTH, 12, dtype=torch.float64)
    with pytest.raises(InputError, match="inputs_embeds: drafting 'multi_token' reads the ids"):
        built(inputs_embeds=vectors, labels=batch["input_ids"])


def test_models_that_are_divided_are_refused():
    built = model(KINDS[0])
    with pytest.raises(InputError, match="pipeline: the parts that draft need all layers in one process"):
        check_pipelined(built)
    with pytest.raises(InputError, match="tensor: parts that draft are not divided; leave tensor at 1"):
        check_tensor_parallel(built, 2)
