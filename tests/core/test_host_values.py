"""Values that the host knows of tensors on a device, here `meta`: checks, masks and labels read them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyformer.core import host_values as module
from polyformer.core.errors import InputError
from polyformer.core.host_values import (
    IGNORED,
    batch_to_device,
    check_labels,
    drop_full_mask,
    host_values,
    next_labels,
    on_host,
    remember,
    tensor_on,
)
from polyformer.core.ops import cross_entropy
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs
from polyformer.models.architectures.arguments import check_mask, check_vocabulary


def known(values: Tensor) -> Tensor:
    """A tensor on the device that was copied from the host."""
    return remember(values.to("meta"), values)


def test_values_are_known_until_the_tensor_changes():
    x = torch.tensor([1, 2])
    assert host_values(x) is x
    assert on_host(x) is on_host(known(x)) is x
    assert host_values(x.to("meta")) is None
    moved = known(x)
    assert host_values(moved) is x
    assert host_values(moved + 0) is None
    moved += 1
    assert host_values(moved) is None
    with torch.inference_mode():  # which counts no changes
        assert host_values(known(x)) is x


def test_a_batch_on_a_device_is_checked_like_one_on_the_host():
    with pytest.raises(InputError, match="input_ids: expected ids from 0 to 4, got 0 to 5"):
        check_vocabulary("input_ids", known(torch.tensor([[0, 5]])), 5)
    with pytest.raises(InputError, match="attention_mask: expected 1 for tokens that count"):
        check_mask("attention_mask", known(torch.tensor([[0, 2]])), (1, 2))
    with pytest.raises(InputError, match="labels: expected numbers from 0 to 3, or -100, got 0 to 4"):
        check_labels(known(torch.tensor([4, IGNORED])), torch.Size([2]), 4)
    check_vocabulary("input_ids", torch.tensor([[0, 5]]).to("meta"), 5)  # nothing is known


@pytest.mark.parametrize("hidden", [0, 1])
def test_a_mask_that_hides_nothing_is_dropped(hidden: int):
    mask = torch.ones(2, 3, dtype=torch.long)
    mask[0, 2] = 1 - hidden
    inputs = ModelInputs(torch.zeros(2, 3, dtype=torch.long, device="meta"), known(mask))
    valid = NO_TOKENS.extended(inputs).new_valid(3)
    assert (valid is None) == (not hidden)
    if valid is not None:
        values = host_values(valid)
        assert values is not None
        assert torch.equal(values, mask.bool())


def test_documents_of_a_context_are_known():
    documents = torch.tensor([[0, 0, 1], [0, 1, 1]])
    inputs = ModelInputs(torch.zeros(2, 3, dtype=torch.long, device="meta"), document_ids=known(documents))
    context = NO_TOKENS.extended(inputs).context(3, causal=True)
    for numbers in (context.q_doc, context.kv_doc):
        assert numbers is not None
        values = host_values(numbers)
        assert values is not None
        assert torch.equal(values, documents)


@pytest.mark.parametrize("has_documents", [False, True])
def test_the_next_labels_are_known(has_documents: bool):
    labels = torch.tensor([[1, 2, 3, 4]])
    documents = torch.tensor([[0, 0, 1, 1]]) if has_documents else None
    moved = next_labels(known(labels), None if documents is None else known(documents))
    values = host_values(moved)
    assert values is not None
    assert torch.equal(values, next_labels(labels, documents))
    assert host_values(next_labels(known(labels), labels.to("meta"))) is None


def test_the_loss_finds_labelled_tokens_on_the_host(monkeypatch: pytest.MonkeyPatch):
    moved: list[Tensor] = []

    def to_device(tensor: Tensor, device: torch.device) -> Tensor:
        moved.append(tensor)
        return tensor.to(device)

    monkeypatch.setattr(cross_entropy, "to_device", to_device)
    labels = torch.tensor([[3, IGNORED], [IGNORED, 1]])
    tokens = cross_entropy._labelled(known(labels))
    assert tokens.device.type == "meta"
    assert [x.tolist() for x in moved] == [[0, 3]]
    assert cross_entropy._labelled(labels).tolist() == [0, 3]
    assert module.NAME not in vars(labels)


def test_numbers_reach_a_device() -> None:
    assert torch.equal(tensor_on([1, 2], torch.device("cpu")), torch.tensor([1, 2]))
    half = tensor_on([[0.5]], torch.device("meta"), torch.bfloat16)
    assert (half.device.type, half.dtype, half.shape) == ("meta", torch.bfloat16, (1, 1))


@pytest.mark.parametrize(
    ("mask", "dropped"),
    [
        (known(torch.ones(2, 3)), True),
        (known(torch.zeros(2, 3)), False),
        (torch.ones(2, 3).to("meta"), False),
        (torch.ones(2, 3), False),
    ],
)
def test_a_compiled_model_gets_no_mask_of_only_ones(mask: Tensor, dropped: bool):
    inputs = {"input_ids": mask, "attention_mask": mask, "global_attention_mask": mask}
    arguments, kept = drop_full_mask(torch.nn.Identity(), (1,), inputs)
    assert arguments == (1,)
    assert inputs.keys() - kept.keys() == ({"attention_mask"} if dropped else set())


class RecordedStreams:
    """A CUDA device without a GPU: what runs in which stream, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.current = "computations"
        monkeypatch.setattr(module, "_copy_stream", lambda device: "copies")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(module, "to_device", self.to_device)

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def wait_stream(self, other: str) -> None:
        self.events.append(f"{self.current} wait for {other}")

    def to_device(self, tensor: str, device: torch.device) -> Any:
        self.events.append(f"{tensor} in {self.current}")
        return SimpleNamespace(
            record_stream=lambda stream: self.events.append(f"{tensor} is used in {stream.current}")
        )


def test_a_gpu_copies_a_batch_while_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = RecordedStreams(monkeypatch)
    batch: Any = {"ids": "ids", "labels": "labels"}
    assert batch_to_device(batch, torch.device("cuda")).keys() == batch.keys()
    assert streams.events == [
        "ids in copies",
        "labels in copies",
        "computations wait for copies",
        "ids is used in computations",
        "labels is used in computations",
    ]
