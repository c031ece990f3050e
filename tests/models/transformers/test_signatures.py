"""Every argument that transformers' `forward` names is honoured as there, or refused by its name."""

import inspect
from itertools import cycle
from typing import Any

import pytest
import torch
from twins import FAMILIES, PRESENT, T, V, texts, transformers, twins

from polyformer.core.errors import InputError
from polyformer.models.transformers.base import PolyformerModel
from polyformer.models.transformers.inputs import ADD_TOKENS, UNSUPPORTED_ARGUMENTS

GENERATOR = torch.Generator().manual_seed(7)
LENGTHS = torch.tensor([T, T - 5, T - 9])
MASK = (torch.arange(T) < LENGTHS[:, None]).long()
VALUES: dict[str, Any] = {
    "attention_mask": MASK,
    "token_type_ids": torch.arange(T).expand(3, T) // (T // 2),
    "position_ids": torch.arange(T).expand(3, T).flip(0) + 7,
    "inputs_embeds": torch.randn(3, T, 16, generator=GENERATOR, dtype=torch.float64),
    "decoder_inputs_embeds": torch.randn(3, T, 16, generator=GENERATOR, dtype=torch.float64),
    "decoder_input_ids": texts(3, T).flip(1),
    "decoder_attention_mask": MASK,
    "global_attention_mask": (torch.arange(T).expand(3, T) % 7 == 1).long(),
    "mc_token_ids": torch.tensor([3, T - 1, 7]),
    "mc_labels": torch.tensor([2]),
    "langs": torch.randint(3, (3, T), generator=GENERATOR),
    "lengths": LENGTHS,
    "use_cache": True,
    "output_router_logits": True,
    "logits_to_keep": 3,
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict": False,
    "labels": torch.randint(V, (3, T), generator=GENERATOR),
    "next_sentence_label": torch.tensor([0, 1, 1]),
    "sentence_order_label": torch.tensor([0, 1, 1]),
    "start_positions": torch.tensor([1, 4, 99]),
    "end_positions": torch.tensor([3, 99, 9]),
    "encoder_hidden_states": torch.randn(3, 4, 16, generator=GENERATOR, dtype=torch.float64),
    "encoder_attention_mask": torch.ones(3, 4),
    "question_lengths": torch.tensor([[3], [4], [5]]),
    "num_hashes": 2,
    "past_buckets_states": [],
    "cache": {},
}
EVERYWHERE = {"num_items_in_batch": torch.tensor(17), "output_attentions": True, "output_hidden_states": True}
"""What all of transformers' models take beside their names."""

REST = {"past_key_values", "cache_params", "encoder_outputs", "kwargs", "input_ids"}
"""Arguments that tests of generation give."""


def inputs(family: str, model: Any) -> dict[str, Any]:
    ids = texts()
    if family in ("t5", "xlm"):
        ids[:, -1] = 1
    batch = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    if family == "longformer":
        ids[:, [2, 3, 5]], ids[:, -1] = 2, 7  # three of them mark the question's end
    return batch


def named(model: Any) -> list[str]:
    signature = inspect.signature(model.forward).parameters
    names = [name for name in signature if name not in REST]
    return [*names, *(name for name in EVERYWHERE if name not in names)]


def value(name: str, task: str) -> Any:
    if name == "labels" and "MultipleChoice" in task:
        return torch.tensor([2])
    if name == "labels" and "SequenceClassification" in task:
        return torch.tensor([0, 2, 1])
    if name == "labels" and (
        "TokenClassification" in task or "NextSentence" in task or "PreTraining" in task
    ):
        labels = VALUES[name] % (3 if "Token" in task else 2)
        return labels[:, 0] if "NextSentence" in task else labels
    return {**VALUES, **EVERYWHERE}[name]


def outcome(model: Any, inputs: dict[str, Any]) -> Any:
    copies = {name: item.clone() if torch.is_tensor(item) else item for name, item in inputs.items()}
    with torch.no_grad():
        return model(**copies)  # some of theirs change what they are given


def attempt(model: Any, inputs: dict[str, Any]) -> tuple[Any, Exception | None]:
    """The output, or None and why there is none."""
    crashes = () if isinstance(model, PolyformerModel) else (RuntimeError,)  # OpenAI-GPT's of two heads does
    try:
        return outcome(model, inputs), None
    except (InputError, NotImplementedError, TypeError, ValueError, AttributeError, *crashes) as error:
        return None, error


def compare(actual: Any, expected: Any, mask: torch.Tensor | None) -> None:
    """All that theirs returned is here, and the same at real tokens."""
    if isinstance(expected, tuple):
        actual, expected = (
            {str(i): field for i, field in enumerate(x) if torch.is_tensor(field)} for x in (actual, expected)
        )
    for name, field in expected.items():
        if name in ("past_key_values", "past_buckets_states", "cache_params") or (
            isinstance(field, tuple) and not field
        ):
            continue
        pairs = zip(actual[name], field, strict=True) if isinstance(field, tuple) else [(actual[name], field)]
        for a, b in pairs:
            if mask is not None and a.shape[:2] == mask.shape:
                a, b = a[mask.bool()], b[mask.bool()]
            elif mask is not None and a.dim() == 4:
                a, b = a[:, :, :1], b[:, :, :1]
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-4, check_dtype=False, msg=lambda text, name=name: f"{name}: {text}"
            )


SCALED = "bigbird_pegasus", "gemma3_text", "m2m_100"
"""Families that multiply token vectors, but not the inputs_embeds that they are given."""

FORMATS = {
    ("longformer", "output_attentions"): "theirs of a window's width",
    ("mamba2", "output_hidden_states"): "theirs of the outputs of layers",
    ("qwen3_5_moe_text", "output_attentions"): "theirs of softmax layers only",
    ("qwen3_5_text", "output_attentions"): "theirs of softmax layers only",
    ("qwen3_next", "output_attentions"): "theirs of softmax layers only",
    ("reformer", "output_attentions"): "theirs of chunks",
    ("reformer", "output_hidden_states"): "theirs of both streams",
    ("reformer", "position_ids"): "theirs pads them to chunks with others",
}
"""What is laid out otherwise in transformers' model, and so is not compared."""

TYPED = ("token_type_ids",)
"""What models without it refuse."""

AS_ROWS = {
    "distilbert": ("position_ids",),
    "openai-gpt": ("attention_mask", "position_ids"),
    "gpt2": ("position_ids",),
}
"""What theirs takes of the texts [B, C, T] as rows [B C, T] alone."""


def arguments(
    name: str, family: str, task: str, base: dict[str, Any], ours: Any, theirs: Any
) -> dict[str, Any]:
    """`base` with the argument `name`, and what it needs beside it."""
    inputs = {**base, name: value(name, task)}
    both = theirs.config.is_encoder_decoder
    if name.endswith("inputs_embeds"):
        del inputs[name.replace("inputs_embeds", "input_ids")]
        inputs[name] = inputs[name][..., : ours.get_input_embeddings().weight.shape[1]]
    if name == "attention_mask" and not both:
        inputs["input_ids"] = base["input_ids"].masked_fill(MASK == 0, theirs.config.pad_token_id or 0)
    if name == "decoder_attention_mask" and "SequenceClassification" in task:
        inputs[name] = torch.ones_like(MASK)  # the end is where its label is read
    if name in ("start_positions", "end_positions"):
        inputs |= {place: VALUES[place] for place in ("start_positions", "end_positions")}
    takes = inspect.signature(theirs.forward).parameters
    if name in ("next_sentence_label", "sentence_order_label", "num_items_in_batch") and "labels" in takes:
        inputs["labels"] = value("labels", task)
    if task == "DoubleHeadsModel" and name == "attention_mask":  # theirs would read padding
        inputs["mc_token_ids"] = (LENGTHS - 1).unsqueeze(0)
    if name == "mc_token_ids":
        inputs[name] = inputs[name].unsqueeze(0)
    if "MultipleChoice" in task or task == "DoubleHeadsModel":  # the texts are the choices of one question
        of_texts = {name: x for name, x in inputs.items() if torch.is_tensor(x) and x.shape[:2] == (3, T)}
        for rows in AS_ROWS.get(family, ()):
            of_texts.pop(rows, None)
        inputs |= {name: x.unsqueeze(0) for name, x in of_texts.items()}
    return inputs


@pytest.mark.parametrize("family", [name for name in PRESENT if name != "decision_transformer"])
def test_every_argument(family: str):
    eager = {} if family in ("deberta", "reformer") else {"attn_implementation": "eager"}
    for task in FAMILIES[family].tasks:
        ours, theirs = twins(family, task, **eager)
        try:
            check_arguments(family, task, ours, theirs)
            if task.endswith(("Model", "LM")) and task != "DoubleHeadsModel" and family != "reformer":
                check_rows_for_all_texts(family, ours, theirs)
        except AssertionError as error:
            error.add_note(f"of {family}'s {task}")
            raise


def check_arguments(family: str, task: str, ours: Any, theirs: Any) -> None:
    base = inputs(family, theirs)
    for name in named(theirs):
        batch = arguments(name, family, task, base, ours, theirs)
        expected, refusal = attempt(theirs, batch)
        actual, refusal = attempt(ours, batch)
        if actual is None:
            assert isinstance(refusal, InputError), f"{name}: {refusal!r}"
            assert name in str(refusal), f"{name}: {refusal}"
            assert name in {*UNSUPPORTED_ARGUMENTS, *TYPED} or expected is None, f"{name}: {refusal}"
            continue
        assert name not in UNSUPPORTED_ARGUMENTS, f"{name} was swallowed"
        if name == "num_items_in_batch" or (family, name) in FORMATS or expected is None:
            continue  # parts of a batch: tests of the Trainer
        if family in SCALED and name.endswith("inputs_embeds"):  # ours are scaled after, as token vectors
            expected = outcome(theirs, batch | {name: batch[name] * 4})
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        mask = None if mask is None else mask.flatten(0, -2)
        try:
            compare(actual, expected, MASK if name == "lengths" else mask)
        except AssertionError as error:
            error.add_note(f"given {name}")
            raise


def check_rows_for_all_texts(family: str, ours: Any, theirs: Any) -> None:
    """A row of numbers stands for a row of each text."""
    batch = inputs(family, theirs)
    takes = inspect.signature(theirs.forward).parameters.keys()
    for name in takes & {"position_ids", "token_type_ids", "langs"}:
        row = VALUES[name][:1] * (name != "token_type_ids" or "deberta" not in family)
        actual, expected = (
            outcome(ours, {**batch, name: numbers})[0] for numbers in (row, row.expand(3, -1))
        )
        assert torch.equal(actual, expected), name


def test_unknown_arguments_are_refused():
    ours, _ = twins("bert", "ForMaskedLM")
    with pytest.raises(TypeError, match="unexpected keyword argument 'attention_masks'"):
        ours(texts(), attention_masks=MASK)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        ours(texts(), input_ids=texts())
    with pytest.raises(InputError, match="past_key_values: an encoder has no cache"):
        ours(texts(), past_key_values=transformers.DynamicCache())
    assert ours(texts(), cu_seq_lens_k=None).logits.shape == (3, T, V)


@pytest.mark.parametrize(("dtype", "family"), [*zip(cycle([torch.float32, torch.float64]), ADD_TOKENS)])
def test_token_types_that_are_tokens(family: str, dtype: torch.dtype):
    ours, theirs = twins(family, next(iter(FAMILIES[family].tasks)), dtype)
    batch = {"input_ids": texts(), "token_type_ids": texts().flip(0), "attention_mask": MASK}
    compare(outcome(ours, batch), outcome(theirs, batch), MASK)
    if family == "gpt2":  # CTRL's generation leaves them out
        del batch["attention_mask"]
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        assert torch.equal(ours.generate(**batch, **settings), theirs.generate(**batch, **settings))


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_the_configuration_asks_too(name: str):
    ours, theirs = twins("gpt2", "LMHeadModel", attn_implementation="eager")
    ours.set_attn_implementation("eager")
    for model in (ours, theirs):
        setattr(model.config, name, True)
    actual, expected = (
        outcome(model, {"input_ids": texts(), "use_cache": False}) for model in (ours, theirs)
    )
    assert actual[name.removeprefix("output_")]
    compare(actual, expected, None)


def test_the_configuration_asks_for_tuples():
    ours, _ = twins("bert", "ForMaskedLM")
    expected = ours(texts(), labels=texts())
    ours.config.return_dict = False
    actual = ours(texts(), labels=texts())
    assert isinstance(actual, tuple)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected.to_tuple(), strict=True))


def test_labels_that_were_shifted():
    ours, theirs = twins("gptj", "ForCausalLM")
    shifted = VALUES["labels"].roll(-1, 1)
    actual, expected = (model(texts(), shift_labels=shifted, labels=shifted).loss for model in (ours, theirs))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
