"""Several threads that generate with one model: none sees what another does to its mode."""

import threading
from collections.abc import Callable

import pytest
import torch
from tiny_models import decoder, pair, prompts
from torch import Tensor

from polyformer.generation.evaluating import evaluating
from polyformer.model import Transformer


def texts(model: Transformer, streamer: Callable[[Tensor], None] | None = None) -> Tensor:
    return model.generate(prompts(2, 5), max_new_tokens=12, min_new_tokens=12, streamer=streamer).sequences


@pytest.mark.parametrize("family", [decoder, pair])
def test_the_end_of_one_call_turns_no_dropout_on_in_another(family: Callable[[int], Transformer]):
    """The first call waits, half-way, until a second one that began later has ended, and one before it."""
    model = family(2)
    expected = texts(model)
    model.train()
    model.head.eval()
    began, ended = threading.Event(), threading.Event()
    found: dict[str, Tensor] = {}
    steps: list[Tensor] = []

    def wait(tokens: Tensor) -> None:
        steps.append(tokens)
        if len(steps) == 4:
            began.set()
            assert ended.wait(60)

    slow = threading.Thread(target=lambda: found.update(slow=texts(model, wait)))
    with evaluating(model):  # a call that ends while the slow one writes
        slow.start()
        assert began.wait(60)
    for name in ("second", "third"):
        other = threading.Thread(target=lambda name=name: found.update({name: texts(model)}))
        other.start()
        other.join(60)
    assert not model.training, "the slow call still writes"
    ended.set()
    slow.join(60)
    assert set(found) == {"slow", "second", "third"}
    assert all(torch.equal(one, expected) for one in found.values())
    assert model.training
    assert model.decoder is not None
    assert all(module.training for module in model.decoder.modules())
    assert not model.head.training


def test_many_threads_write_what_one_writes():
    model = decoder(2)
    expected = texts(model)
    model.train()
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(texts(model))) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(found) == 8
    assert all(torch.equal(one, expected) for one in found)
    assert model.training


def test_an_error_leaves_the_mode_as_it_was():
    model = decoder(2).train()

    def wrong(tokens: Tensor) -> None:
        assert not model.training
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        texts(model, wrong)
    assert all(module.training for module in model.modules())
