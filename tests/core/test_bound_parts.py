"""A stack that nothing watches runs as plain functions, with equal values; hooks and changes are seen."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyformer import create_model
from polyformer.core.ops.linear import Linear
from polyformer.core.parts import Bound, own_attributes, unbound
from polyformer.models.architectures.weights import quantize_weights
from polyformer.nn.stack import Stack

SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
IDS = torch.arange(5, 29).view(2, 12)

ROTATED = {"preset": "decoder-tiny", "position": "rope"}

MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"preset": "decoder-tiny"},
    "encoder": {"preset": "encoder-tiny"},
    "encoder-decoder": {"preset": "transformer-tiny"},
    "rms, rotated, grouped": {
        "preset": "decoder-tiny",
        "norm": "rms",
        "position": "rope",
        "num_key_value_heads": 1,
    },
    "memory": {
        "preset": "decoder-tiny",
        "position": "rope",
        "memory": "compressive(length=4, compressed_length=2)",
    },
    "halting": {"preset": "encoder-tiny", "depth": "act"},
    "recurrence": {"preset": "decoder-tiny", "mechanism": "gated_delta"},
}


def model(preset: str = "decoder-tiny", **options: Any) -> Any:
    torch.manual_seed(0)
    return create_model(preset, **{**SIZES, **options}).double().eval()


def calls_of_modules(call: Callable[[], object]) -> int:
    """Return how often `nn.Module.__call__` runs."""
    count = 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is nn.Module._call_impl.__code__

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def stacks(built: nn.Module) -> list[Stack]:
    return [module for module in built.modules() if isinstance(module, Stack)]


def as_modules(built: nn.Module, call: Callable[[], Any]) -> Any:
    """Return the result of a call in which a hook that does nothing keeps all parts modules."""
    handles = [stack.layers[0].register_forward_hook(lambda *_: None) for stack in stacks(built)]
    try:
        return call()
    finally:
        for handle in handles:
            handle.remove()


def no_part_is_bound(built: nn.Module) -> bool:
    return not any(
        type(value) is Bound or (isinstance(value, list) and any(type(each) is Bound for each in value))
        for module in built.modules()
        for value in module.__dict__.values()
    )


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_values_and_gradients_are_those_of_modules_bit_for_bit(options: dict[str, Any]):
    built = model(**options)
    inputs = {"input_ids": IDS, "labels": IDS} if built.head.predicts_next else {"input_ids": IDS}

    def step() -> tuple[Tensor, ...]:
        out = built(**inputs, output_hidden_states=True)
        built.zero_grad()
        (out.last_hidden_state.square().sum() + (0 if out.loss is None else out.loss)).backward()
        gradients = (weight.grad for weight in built.parameters())
        return out.last_hidden_state, *(torch.zeros(1) if each is None else each for each in gradients)

    step()
    bound, calls = step(), calls_of_modules(step)
    plain, more = as_modules(built, step), as_modules(built, lambda: calls_of_modules(step))
    assert calls < more
    assert len(bound) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(bound, plain))
    assert no_part_is_bound(built)


def test_every_kind_of_hook_runs_in_the_next_call():
    built = model()
    layer = built.decoder.layers[0]
    built(IDS)
    seen: list[str] = []
    for module in (layer, layer.attention, layer.attention.query, layer.block.norms[1], layer.feedforward.up):
        for register, name in (
            (module.register_forward_hook, "after"),
            (module.register_forward_pre_hook, "before"),
            (module.register_full_backward_hook, "backward"),
            (module.register_full_backward_pre_hook, "before backward"),
        ):
            seen.clear()
            handle = register(lambda *_, name=name: seen.append(name))
            built(IDS).last_hidden_state.sum().backward()
            assert seen == [name]
            handle.remove()
            built(IDS).last_hidden_state.sum().backward()
            assert seen == [name]
    counts = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("global"))
    built(IDS)
    counts.remove()
    assert seen.count("global") > 20


def changed_weight(built: Any) -> None:
    built.decoder.layers[0].attention.query.weight = nn.Parameter(torch.zeros(16, 16).double())


def changed_table(built: Any) -> None:
    built.decoder.layers[0].feedforward._modules["up"] = nn.Linear(16, 16).double()


def changed_part(built: Any) -> None:
    built.decoder.layers[0].feedforward = copy.deepcopy(built.decoder.layers[1].feedforward)


def changed_list(built: Any) -> None:
    built.decoder.layers[0].block.norms[0] = nn.Identity()


def changed_constant(built: Any) -> None:
    built.decoder.layers[0].block.norms[0].eps = 0.5


def changed_storage(built: Any) -> None:
    built.decoder.layers[0].attention.value.weight.data = torch.ones(16, 16).double()


def changed_method(built: Any) -> None:
    built.decoder.layers[0].feedforward.forward = lambda x, context: x


def changed_projection(built: Any) -> None:
    attention = built.decoder.layers[0].attention
    attention._projected = lambda x: type(attention)._projected(attention, 2 * x)


def changed_class(built: Any) -> None:
    nn.utils.parametrize.register_parametrization(
        built.decoder.layers[0].attention.output, "weight", Doubled()
    )


def assigned(built: Any) -> None:
    state = {name: weight.detach() / 2 for name, weight in built.state_dict().items()}
    built.load_state_dict(state, assign=True)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize(
    "change",
    [
        changed_weight,
        changed_table,
        changed_part,
        changed_list,
        changed_constant,
        changed_storage,
        changed_method,
        changed_projection,
        changed_class,
        assigned,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_change_counts_from_the_next_call(change: Callable[[Any], None], dtype: torch.dtype):
    """Later calls too, and a change stays where it was made."""
    built = model()
    before = built(IDS).last_hidden_state
    change(built)
    built.to(dtype)
    expected = as_modules(built, lambda: built(IDS).last_hidden_state)
    assert not torch.equal(expected, before.to(dtype))
    for _ in range(3):
        assert torch.equal(built(IDS).last_hidden_state, expected)
    assert no_part_is_bound(built)


def test_a_functional_call_reads_its_weights():
    built = model()
    built(IDS)
    zeros = {name: torch.zeros_like(weight) for name, weight in built.named_parameters()}
    for _ in range(2):
        assert not functional_call(built, zeros, (IDS,)).last_hidden_state.any()
        assert built(IDS).last_hidden_state.any()


def test_a_compiled_layer_runs_compiled():
    built = model()
    built(IDS)
    expected, seen = built(IDS).last_hidden_state, []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    built.decoder.layers[0].feedforward.compile(backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(built(IDS).last_hidden_state, expected)
    assert seen


def test_parts_are_modules_again_after_an_error():
    built, seen = model(), []

    def fail(x: Tensor, context: object) -> Tensor:
        seen.append(type(built.decoder.layers[1].attention) is Bound)
        raise ValueError("own member")

    kind = type(built.decoder.layers[1].feedforward)
    other = type("Failing", (kind,), {"forward": lambda self, x, context=None: fail(x, context)})
    built.decoder.layers[1].feedforward.__class__ = other
    built.decoder.layers[0].feedforward.__class__ = other
    for _ in range(3):
        with pytest.raises(ValueError, match="own member"):
            built(IDS)
    assert seen == [False, True, True]  # the first call finds other classes, and the next one binds them
    assert no_part_is_bound(built)


def test_generation_binds_for_all_steps_and_ends_with_modules():
    built = model()
    seen: list[bool] = []
    expected = as_modules(built, lambda: built.generate(IDS, max_new_tokens=6).sequences)

    def look(tokens: Tensor) -> None:
        seen.append(no_part_is_bound(built))

    assert torch.equal(built.generate(IDS, max_new_tokens=6, streamer=look).sequences, expected)
    assert seen == [True] + [False] * 5  # the prompt is a call of its own
    assert no_part_is_bound(built)

    def fail(tokens: Tensor) -> None:
        if len(seen) > 8:
            raise KeyboardInterrupt
        seen.append(True)

    with pytest.raises(KeyboardInterrupt):
        built.generate(IDS, max_new_tokens=6, streamer=fail)
    assert no_part_is_bound(built)


def test_threads_share_a_binding():
    built = model()
    expected = built(IDS).last_hidden_state
    wrong: list[int] = []

    def work() -> None:
        for _ in range(30):
            if not torch.equal(built(IDS).last_hidden_state, expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert no_part_is_bound(built)


def test_copies_begin_without_a_binding():
    built = model()
    expected = built(IDS).last_hidden_state
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert not other.decoder.bindings.bindings
        assert torch.equal(other(IDS).last_hidden_state, expected)
        other.decoder.layers[0].attention.query.weight.data.zero_()
        assert not torch.equal(other(IDS).last_hidden_state, expected)
    assert torch.equal(built(IDS).last_hidden_state, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda built: pickle.loads(pickle.dumps(built))])
def test_a_copy_made_during_a_call_is_a_model_of_its_own(copied: Callable[[Any], Any]):
    built = model()
    expected = built(IDS).last_hidden_state
    assert built.decoder.bind(rows=24)
    try:
        other = copied(built)
    finally:
        built.decoder.bindings.end()
    assert no_part_is_bound(other)
    assert torch.equal(other(IDS).last_hidden_state, expected)
    other.decoder.layers[0].attention.query.weight.data.zero_()
    assert not torch.equal(other(IDS).last_hidden_state, expected)
    assert torch.equal(built(IDS).last_hidden_state, expected)


def test_a_hook_is_seen_while_another_call_runs():
    built, seen = model(), []
    expected = built(IDS).last_hidden_state
    assert built.decoder.bind(rows=24)  # as in another thread
    handle = built.decoder.layers[0].attention.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(built(IDS).last_hidden_state, expected)
    assert seen == [1]
    handle.remove()
    built.decoder.bindings.end()
    assert no_part_is_bound(built)
    assert calls_of_modules(lambda: built(IDS)) < as_modules(
        built, lambda: calls_of_modules(lambda: built(IDS))
    )


def test_replaced_weights_are_freed():
    built = model().float()
    built(IDS)
    query = built.decoder.layers[0].attention.query
    old = weakref.ref(query.weight)
    built.load_state_dict({name: x.clone() for name, x in built.state_dict().items()}, assign=True)
    assert old() is None
    old, layer = weakref.ref(query.weight), weakref.ref(query)
    del query
    quantize_weights(built, "int8")
    assert old() is layer() is None
    assert built(IDS).logits.isfinite().all()


def test_a_model_is_freed_with_its_last_reference():
    built = model()
    built(IDS)
    built.generate(IDS, max_new_tokens=2)
    parts = [weakref.ref(module) for module in built.modules()]
    gc.disable()
    try:
        del built
        assert not any(part() for part in parts)
    finally:
        gc.enable()


def test_a_bound_part_is_its_module_in_other_respects():
    built = model()
    layer, stack = built.decoder.layers[0], built.decoder
    assert stack.bind(rows=24)
    query = layer.attention.query
    try:
        assert type(query) is Bound
        assert isinstance(query, Linear)
        assert query.weight is layer._modules["attention"]._modules["query"]._parameters["weight"]
        query.training = True
        assert unbound(query).training
        assert type(copy.deepcopy(query)) is type(copy.copy(query)) is Linear
        assert "attention" not in own_attributes(layer)
        assert layer.tokenwise is own_attributes(layer)["tokenwise"]
    finally:
        stack.bindings.end()
    assert layer.attention.query is unbound(query)
