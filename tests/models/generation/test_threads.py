"""Generation by several threads, and the mode of a model, which belongs to the caller as in PyTorch."""

import threading

import pytest
import torch
from tiny_models import decoder, prompts
from torch import Tensor

from polyformer.core.errors import Caution
from polyformer.core.modules import evaluating
from polyformer.models.architectures import Transformer


def texts(model: Transformer) -> Tensor:
    return model.generate(prompts(2, 5), max_new_tokens=12, min_new_tokens=12).sequences


def test_many_threads_write_what_one_writes():
    model = decoder(2).eval()
    expected = texts(model)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(texts(model))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8
    assert all(torch.equal(tokens, expected) for tokens in results)


def test_a_model_in_training_mode_is_used_as_it_is_with_a_warning():
    model = decoder(2).eval()
    calm = model.generate(prompts(2, 5), max_new_tokens=2).scores
    model.train()
    with pytest.warns(Caution, match=r"model: expected a model in evaluation mode.*model\.eval\(\)") as said:
        scores = model.generate(prompts(2, 5), max_new_tokens=2).scores
    assert not torch.equal(scores, calm), "dropout was off"
    assert {warning.filename for warning in said} == {__file__}
    assert all(module.training for module in model.modules())


def test_a_draft_in_training_mode_has_a_warning():
    model, draft = decoder(2).eval(), decoder(3).train()
    with pytest.warns(Caution, match="draft: expected a model in evaluation mode"):
        model.generate(prompts(1, 5), max_new_tokens=2, draft=draft)


def test_evaluation_mode_ends_with_each_module_in_its_own_mode():
    model = decoder(2).train()
    model.head.eval()
    with pytest.raises(ZeroDivisionError), evaluating(model):
        _ = 1 / sum(module.training for module in model.modules())
    assert not model.head.training
    assert model.decoder is not None
    assert all(module.training for module in model.decoder.modules())
