"""The matrix of the logits: read, replaced, resized and adapted as that of transformers' models."""

from pathlib import Path

import pytest
import torch
from torch import nn
from twins import texts, twins

from polyformer.core.errors import InputError

V, E = 40, 16
HEADS = [
    ("gpt2", "LMHeadModel"),  # tied
    ("gptj", "ForCausalLM"),  # a matrix and a bias of its own
    ("llama", "ForCausalLM"),  # a matrix of its own
    ("bert", "ForMaskedLM"),  # tied, with a bias and a layer before it
    ("bert", "ForPreTraining"),  # beside another head
    ("bart", "ForConditionalGeneration"),  # tied, with a bias that is never trained
]


@pytest.mark.parametrize(("family", "task"), HEADS)
def test_the_matrix_is_that_of_a_module_of_the_model(family: str, task: str):
    ours, theirs = twins(family, task)
    module = ours.get_output_embeddings()
    assert any(module is each for each in ours.modules())
    assert torch.equal(module.weight, theirs.get_output_embeddings().weight)
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    assert (module.weight is ours.get_input_embeddings().weight) == tied


def test_heads_without_a_vocabulary_have_none():
    ours, _ = twins("bert", "ForSequenceClassification")
    assert ours.get_output_embeddings() is None
    with pytest.raises(InputError, match="no matrix over the vocabulary"):
        ours.set_output_embeddings(nn.Linear(E, V))


@pytest.mark.parametrize(("family", "bias"), [("gptj", True), ("llama", False)])
def test_another_matrix_takes_effect(family: str, bias: bool, tmp_path: Path):
    ours, _ = twins(family, "ForCausalLM")
    new = nn.Linear(E, V, bias=bias, dtype=torch.float64)
    ours.set_output_embeddings(new)
    assert ours.get_output_embeddings().weight is new.weight
    result = ours(texts(), output_hidden_states=True)
    logits = result.logits
    torch.testing.assert_close(logits, new(result.hidden_states[-1]), rtol=1e-10, atol=1e-10)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in new.parameters())
    ours.tie_weights()
    ours.save_pretrained(tmp_path)
    again = type(ours).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(again(texts()).logits, logits)


def test_a_tied_head_stays_tied():
    ours, theirs = twins("gpt2", "LMHeadModel")
    new = nn.Linear(E, V, bias=False, dtype=torch.float64)
    ours.set_output_embeddings(new)
    theirs.get_input_embeddings().weight = new.weight
    theirs.tie_weights()
    assert ours.get_input_embeddings().weight is new.weight
    torch.testing.assert_close(ours(texts()).logits, theirs(texts()).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(E, V + 1), r"\(40, 16\), got \(41, 16\); for another number of tokens use resize"),
        (nn.Linear(E, V, bias=False), "the head has a bias, the module none"),
        (nn.Identity(), "expected a module with a parameter `weight`"),
    ],
)
def test_what_does_not_fit_is_refused(module: nn.Module, message: str):
    ours, _ = twins("gptj", "ForCausalLM")
    with pytest.raises(InputError, match=message):
        ours.set_output_embeddings(module)


@pytest.mark.parametrize("family", ["gptj", "llama"])
def test_an_own_matrix_is_resized(family: str):
    ours, _ = twins(family, "ForCausalLM")
    expected = ours(texts()).logits
    ours.resize_token_embeddings(V + 7)
    assert ours.get_output_embeddings().weight.shape == (V + 7, E)
    torch.testing.assert_close(ours(texts()).logits[..., :V], expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks transformers so
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_peft_trains_and_saves_the_head(tmp_path: Path):
    peft = pytest.importorskip("peft")
    ours, _ = twins("llama", "ForCausalLM", torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["head"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(ours, config)
    head = adapted.get_base_model().get_output_embeddings()
    before = head.weight.detach().clone()
    optimizer = torch.optim.SGD([each for each in adapted.parameters() if each.requires_grad], 0.1)
    adapted(input_ids=texts(), labels=texts()).loss.backward()
    optimizer.step()
    assert not torch.equal(head.weight, before)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(twins("llama", "ForCausalLM", torch.float32)[0], tmp_path)
    assert torch.equal(again(input_ids=texts()).logits, adapted(input_ids=texts()).logits)
