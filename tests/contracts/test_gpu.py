"""Every member on a GPU, compared with the same weights in float64 on the CPU.

Without a GPU a few members run on the CPU, so that the first run on a GPU does not stop at an error in these
tests.
"""

import collections
import dataclasses
import json
import os
import traceback
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from members import CHOOSING, Case, every_case, gradients, parts, score
from selection import cases, predicting
from test_k8_training import objective
from torch import Tensor

from polyformer import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.generation import GenerationConfig
from polyformer.nn.stack import Stack, StackConfig

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LENGTH = 13


def on_device(some: list[Case]) -> list[Case]:
    """All cases on a GPU, about six on a CPU."""
    return [case.wide() for case in (some if GPU else some[:: max(1, len(some) // 6)])]


@pytest.fixture(autouse=GPU)
def _end_with_a_broken_device() -> Iterator[None]:
    """An error inside a kernel breaks all later calls of its process: end it, and another goes on."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        traceback.print_exc()
        os._exit(1)


def moved(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def chooses(case: Case) -> bool:
    """Whether rounding may send a token elsewhere, so that gradients differ."""
    return any(isinstance(part, CHOOSING) for part in parts(case.config))


@pytest.mark.parametrize("case", on_device(list(every_case())), ids=str)
def test_outputs_and_gradients_equal_the_cpu(case: Case) -> None:
    exact, batch = case.model(), case.labels(case.batch(length=LENGTH))
    model = case.model(torch.float32).to(DEVICE)
    expected, output = exact(**batch), model(**moved(batch))
    assert case.apart(output.last_hidden_state.cpu(), expected.last_hidden_state) < 1e-4
    if expected.loss is not None and not chooses(case):
        torch.testing.assert_close(output.loss.cpu().double(), expected.loss, rtol=1e-4, atol=1e-4)
    slopes, exact_slopes = gradients(model, score(output)), gradients(exact, score(expected))
    for name, slope in exact_slopes.items():
        error = (slopes[name].cpu() - slope).norm() / slope.norm().clamp(1.0)
        assert error < 5e-3 or chooses(case), f"{name}: {error:.1e}"


@pytest.mark.parametrize("case", on_device(predicting("generation")), ids=str)
def test_greedy_tokens_equal_the_cpu(case: Case) -> None:
    ids, config = case.batch(length=LENGTH)["input_ids"], GenerationConfig(max_new_tokens=8)
    exact = case.model().generate(ids, config=config).sequences
    model = case.model(torch.float32).to(DEVICE)
    assert torch.equal(model.generate(ids.to(DEVICE), config=config).sequences.cpu(), exact)


@pytest.mark.skipif(not GPU, reason="tests/models/generation/test_compiled_step.py has the same for a CPU")
@pytest.mark.parametrize("case", on_device(predicting("generation")), ids=str)
def test_compiled_steps_give_the_same_tokens(case: Case) -> None:
    ids, config = case.batch(length=LENGTH)["input_ids"].to(DEVICE), GenerationConfig(max_new_tokens=8)
    model = case.model(torch.float32).to(DEVICE).eval()
    expected = model.generate(ids, config=config).sequences
    try:
        for _ in range(2):  # the second call uses the graph of the first
            assert torch.equal(model.generate(ids, config=config, compile=True).sequences, expected)
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", on_device(cases("every precision") + cases("precision")), ids=str)
def test_a_step_under_autocast_is_near_float64(case: Case, dtype: torch.dtype) -> None:
    exact, batch = case.model(), case.labels(case.batch(length=LENGTH))
    model = case.model(torch.float32).to(DEVICE)
    with torch.autocast(DEVICE, dtype):
        output = model(**moved(batch))
        value = score(output) if output.loss is None else output.loss
        assert value.isfinite()
        slopes = gradients(model, value)
    apart = case.apart(output.last_hidden_state.float().cpu(), exact(**batch).last_hidden_state)
    assert chooses(case) or apart < 16 * torch.finfo(dtype).eps
    for name, slope in slopes.items():
        assert slope.isfinite().all(), name


def losses(case: Case, recompute: bool) -> tuple[Transformer, Callable[[], Tensor]]:
    """A model in training, and its loss with the same dropout at each call."""
    case = case.changed(StackConfig, lambda stack: dataclasses.replace(stack, dropout=0.1))
    model, batch = case.model().to(DEVICE).train(), moved(case.batch(length=LENGTH))
    for stack in model.modules():
        if isinstance(stack, Stack):
            stack.recompute = recompute
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def loss() -> Tensor:
        torch.manual_seed(5)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        return objective(model, batch)

    return model, loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", on_device(cases("dropout", shape=("decoder",))), ids=str)
def test_gradients_with_dropout_are_the_slope_of_the_loss(case: Case, recompute: bool) -> None:
    """By finite differences: the backward pass drops what the forward pass has dropped."""
    # Statistics of the batch may not be counted twice, so that their norm refuses to be recomputed.
    model, loss = losses(case, recompute and "Norm-batch" not in case.member)
    slopes = gradients(model, loss())
    torch.manual_seed(6)
    direction = {name: torch.randn_like(slope) * slope.abs().mean() for name, slope in slopes.items()}
    size = float(sum(step.square().sum() for step in direction.values()) ** 0.5)
    ahead = []
    with torch.no_grad():
        for step in (1e-7 / size, -2e-7 / size):
            for name, parameter in model.named_parameters():
                parameter.add_(direction[name], alpha=step)
            ahead.append(float(loss()))
    expected = sum(float((direction[name] * slope).sum()) for name, slope in slopes.items()) / size
    assert (ahead[0] - ahead[1]) / 2e-7 == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("case", on_device(cases("every precision")), ids=str)
def test_how_often_a_step_waits_for_the_device(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    """The report has the lines of code that wait; a second step runs, whose caches are filled."""
    model, batch = case.model(torch.float32).to(DEVICE).train(), moved(case.batch(length=LENGTH))
    lines = collections.Counter[str]()

    def note(message: object, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
        stack = [frame for frame in traceback.extract_stack()[:-1] if "polyformer" in frame.filename]
        if "synchroniz" in str(message) and stack:
            lines[f"{stack[-1].filename.rpartition('polyformer/')[2]}:{stack[-1].lineno}"] += 1

    for _ in range(2):
        lines.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            if GPU:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                objective(model, batch).backward()
            finally:
                if GPU:
                    torch.cuda.set_sync_debug_mode("default")
    record_property("waits", json.dumps({"member": str(case), "lines": dict(lines)}))
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
