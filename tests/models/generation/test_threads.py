"""Several threads that generate with one model, or train it: none sees what another does to its mode."""

import threading
from collections.abc import Callable

import pytest
import torch
from tiny_models import decoder, pair, prompts
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.core.evaluation_mode import evaluating
from polyformer.models.architectures import Transformer


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
    results: dict[str, Tensor] = {}
    steps: list[Tensor] = []

    def wait(tokens: Tensor) -> None:
        steps.append(tokens)
        if len(steps) == 4:
            began.set()
            assert ended.wait(60)

    slow = threading.Thread(target=lambda: results.update(slow=texts(model, wait)))
    with evaluating(model):  # a call that ends while the slow one writes
        slow.start()
        assert began.wait(60)
    for name in ("second", "third"):
        other = threading.Thread(target=lambda name=name: results.update({name: texts(model)}))
        other.start()
        other.join(60)
    assert not model.training, "the slow call still writes"
    ended.set()
    slow.join(60)
    assert set(results) == {"slow", "second", "third"}
    assert all(torch.equal(tokens, expected) for tokens in results.values())
    assert model.training
    assert model.decoder is not None
    assert all(module.training for module in model.decoder.modules())
    assert not model.head.training


def test_many_threads_write_what_one_writes():
    model = decoder(2)
    expected = texts(model)
    model.train()
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(texts(model))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 8
    assert all(torch.equal(tokens, expected) for tokens in results)
    assert model.training


STACKS = {
    "stored": (decoder, {}),
    "recomputed": (decoder, {"recompute": True}),
    "pair": (pair, {}),
    "reversible": (decoder, {"block": "reversible"}),
}


def learner(name: str) -> Transformer:
    """A model in training mode whose dropout shows in every gradient."""
    family, options = STACKS[name]
    model = family(2)
    if "block" in options:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = Transformer(model.config.override("block", options["block"])).double()
    if model.decoder is not None:
        model.decoder.recompute = options.get("recompute", False)
    return model.train()


def trained(model: Transformer, between: Callable[[], object] = lambda: None) -> Tensor:
    """All gradients of one step, `between` its passes called."""
    model.zero_grad()
    torch.manual_seed(5)
    ids = prompts(2, 9)
    loss = model(ids, labels=ids).loss
    between()
    loss.backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_training_in_another_thread_keeps_its_dropout(name: str, half: str):
    """A call begins before the one pass or the other, and ends when the pass has had time to go wrong."""
    model = learner(name)
    expected, calm = trained(model), trained(model.eval())
    assert not torch.equal(expected, calm)
    model.train()
    began, passed, grads = threading.Event(), threading.Event(), list[Tensor]()

    def hold(tokens: Tensor) -> None:
        began.set()
        passed.wait(0.2)  # a pass that waits for this call cannot say so

    def write() -> None:
        model.generate(prompts(2, 5), max_new_tokens=1, min_new_tokens=1, streamer=hold)

    writer = threading.Thread(target=write)

    def begin() -> None:
        writer.start()
        assert began.wait(60)

    if half == "forward":
        begin()
        grads.append(trained(model))
    else:
        grads.append(trained(model, begin))
    passed.set()
    writer.join(60)
    assert torch.equal(grads[0], expected)
    assert all(module.training for module in model.modules())


def test_a_call_waits_for_a_training_pass():
    """One that begins in the midst of a pass does not turn off the dropout of its later layers."""
    model = learner("stored")
    expected = trained(model)
    assert model.decoder is not None
    writer = threading.Thread(target=lambda: texts(model))

    def begin_once(*_: object) -> None:
        """Returns None, to the other thread too: what a forward hook returns replaces the output."""
        if writer.ident is None:
            writer.start()

    hook = model.decoder.layers[0].register_forward_hook(begin_once)
    grads = trained(model)
    hook.remove()
    writer.join(60)
    assert torch.equal(grads, expected)


def test_a_streamer_cannot_train_what_writes():
    model = learner("stored")
    with pytest.raises(InputError, match="its streamer trains the model that is writing"):
        texts(model, torch.enable_grad()(lambda _: trained(model)))
    assert all(module.training for module in model.modules())
    assert len(trained(model))


def test_an_error_leaves_the_mode_as_it_was():
    model = decoder(2).train()

    def wrong(tokens: Tensor) -> None:
        assert not model.training
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        texts(model, wrong)
    assert all(module.training for module in model.modules())
