"""Inputs and labels for every class of the families' table, by the name of the class."""

import dataclasses
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from families import Inputs, counted, texts
from torch import Tensor

from polyformer.models.checkpoints import FAMILIES

LENGTHS, LENGTH, WHOLE = (11, 8, 3), 11, (11, 11, 11)
TOKENS = torch.full((3, LENGTH), -100)
TOKENS[0, 3], TOKENS[1, 0], TOKENS[2, 2], TOKENS[1, 7], TOKENS[2, 9] = 5, 22, 0, 3, 1
"""Of a text padded on either side a few tokens."""

TOPICS: dict[str, Tensor] = {
    "one": torch.tensor([2, 0, 1]),
    "several": torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]]).double(),
    "number": torch.tensor([0.5, -1.0, 2.0]).double(),
    "numbers": torch.tensor([[0.5, -1.0, 2.0], [0.0, 1.0, 3.0], [-0.5, 0.1, 0.2]]).double(),
}
"""Labels of a text, and below what the configuration says of them."""

PROBLEMS: dict[str, dict[str, Any]] = {
    "one": {"num_labels": 3},
    "several": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "number": {"num_labels": 1},
    "numbers": {"num_labels": 3, "problem_type": "regression"},
}
SENTENCES = torch.tensor([0, 1, 1])
SPANS = torch.tensor([[0, 4], [3, 3], [9, 10]])
THEIR_SPANS = {"start_positions": SPANS[:, 0], "end_positions": SPANS[:, 1]}
DECODED = torch.tensor([[4, 7, 12, 5, 28, 9], [3, 3, 21, 8, 5, 6], [28, 7, 19, 4, 9, 6]])
"""Inputs of the decoder of an encoder-decoder."""

GOALS = torch.tensor([[5, 7, -100, 28, 9, 1], [22, 3, 8, 8, -100, 4], [0, 17, 3, 3, 5, 5]])
"""Labels of the same length."""

GLOBAL = torch.zeros(3, LENGTH, dtype=torch.long)
GLOBAL[0, 1], GLOBAL[0, 5], GLOBAL[0, 10], GLOBAL[2, 1], GLOBAL[2, 9] = 1, 1, 1, 1, 1
"""Tokens that see all and are seen by all, in Longformer; none in a row."""

OWN_SHIFT = ("bart", "bigbird_pegasus", "xlm")
"""Families whose classes of a decoder alone do not shift labels in transformers."""


class Labels(torch.Tensor):
    """Which transformers makes float32 whatever the model is, and here are not."""

    def float(self) -> torch.Tensor:  # type: ignore[override]
        return self.double()


@dataclasses.dataclass
class Case:
    """What both models are given, the tokens in which outputs are compared, and what has no part in them."""

    inputs: Inputs
    labels: Inputs | None = None
    their_labels: Inputs | None = None
    only_theirs: Inputs | None = None
    mask: Tensor | None = None
    dead: tuple[str, ...] = ()


def case(theirs: Any, task: str, side: str, problem: str = "one") -> Case:
    """Texts padded on a side, and labels of the kind that the class takes.

    A question's answer is looked for in texts without padding, as transformers takes padding for a place
    where it could stand; with padding on the left there are no labels. Nor are there of Reformer, which has
    losses in training alone.
    """
    config = theirs.config
    if task == "ForMultipleChoice":
        return choices(theirs)
    if hasattr(config, "image_size"):
        labels = {"labels": torch.tensor([1, 0])} if task == "ForImageClassification" else None
        return Case({"pixel_values": pixels(theirs)}, labels)
    answers = task.startswith("ForQuestionAnswering")
    whole = answers or config.model_type == "siglip_text_model"
    lengths = WHOLE if whole and side == "right" else LENGTHS
    inputs = texts(config.vocab_size, lengths, config.pad_token_id or 0, side)
    mask = inputs["attention_mask"]
    if config.is_encoder_decoder or config.model_type == "clip_text_model":
        inputs["input_ids"] = ended(inputs["input_ids"], mask, config.eos_token_id)
    result = Case(inputs, mask=mask, dead=without_effect(theirs))
    result.only_theirs = positions(theirs, mask)
    add_types(config, inputs)
    if config.model_type in ("led", "longformer"):
        inputs["global_attention_mask"] = GLOBAL * mask
    if config.is_encoder_decoder and task in ("Model", "ForConditionalGeneration", "MTModel"):
        shown = (torch.arange(6) < torch.tensor([[6], [4], [2]])).long()
        result.mask = shown.flip(1) if side == "left" else shown
        pad = config.pad_token_id
        inputs["decoder_input_ids"] = DECODED.masked_fill(result.mask == 0, pad)
        inputs["decoder_attention_mask"] = result.mask
    if not (answers and side == "left") and config.model_type != "reformer":
        add_labels(result, config, task, problem)
    return result


def add_labels(result: Case, config: Any, task: str, problem: str) -> None:
    """Ours, and transformers' where they differ."""
    ids, mask = result.inputs["input_ids"], result.inputs["attention_mask"]
    tokens = TOKENS.masked_fill(mask == 0, -100)
    if task.endswith(("ForCausalLM", "LMHeadModel")) and getattr(
        config, "causal", config.model_type != "xlnet"
    ):
        result.labels, result.their_labels = labelled(ids, mask, config.model_type in OWN_SHIFT)
    elif task in ("ForConditionalGeneration", "MTModel"):
        result.labels = {"labels": GOALS.masked_fill(result.mask == 0, -100)}
    elif task.endswith(("ForMaskedLM", "LMHeadModel")):
        result.labels = {"labels": tokens}
    elif task == "ForPreTraining" and config.model_type == "electra":
        replaced = torch.randint(2, ids.shape, generator=torch.Generator().manual_seed(7))
        result.labels, result.their_labels = {"labels": replaced}, {"labels": replaced.as_subclass(Labels)}
    elif task == "ForPreTraining":
        name = "sentence_order_label" if config.model_type == "albert" else "next_sentence_label"
        result.labels = {"labels": tokens, "sentence_labels": SENTENCES}
        result.their_labels = {"labels": tokens, name: SENTENCES}
    elif task == "ForNextSentencePrediction":
        result.labels = {"labels": SENTENCES}
    elif task == "ForSequenceClassification":
        result.labels = {"labels": TOPICS[problem]}
    elif task == "ForTokenClassification":
        tags = (torch.arange(3 * LENGTH).view(3, LENGTH) % 5).masked_fill(mask == 0, -100)
        result.labels = {"labels": tags}
    elif task.startswith("ForQuestionAnswering"):
        result.labels, result.their_labels = {"labels": SPANS}, THEIR_SPANS


def labelled(ids: Tensor, mask: Tensor, shift: bool = False) -> tuple[Inputs, Inputs]:
    """Labels of the real tokens for us and for transformers, which predicts a text's first token too where
    padding stands before it, and in some classes does not shift them."""
    ours = ids.masked_fill(mask == 0, -100)
    first = mask.diff(prepend=torch.ones_like(mask[:, :1]), dim=1) > 0
    theirs = ours.masked_fill(first, -100)
    return {"labels": ours}, {"labels": F.pad(theirs[:, 1:], (0, 1), value=-100) if shift else theirs}


def choices(theirs: Any) -> Case:
    """Two questions of three choices each, of different lengths; three separators in each."""
    config = theirs.config
    # of Longformer's gradients some are NaN where choices are padded, and XLNet's score the last slot
    lengths = (16,) * 6 if config.model_type in ("longformer", "xlnet") else (11, 8, 7, 9, 11, 10)
    inputs = texts(23, lengths, pad=config.pad_token_id)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    separator = 4 if config.pad_token_id == 2 else 2
    ids[ids == separator] = 5
    ids[:, 2:4] = separator
    ids[torch.arange(6), mask.sum(1) - 1] = separator
    add_types(config, inputs)
    more = None if config.model_type == "distilbert" else positions(theirs, mask)
    return Case(
        {name: tensor.unflatten(0, (2, 3)) for name, tensor in inputs.items()},
        labels={"labels": torch.tensor([2, 0])},
        only_theirs=more and {name: tensor.unflatten(0, (2, 3)) for name, tensor in more.items()},
        mask=mask,
        dead=without_effect(theirs),
    )


def pixels(theirs: Any, rows: int = 2, height: int | None = None, width: int | None = None) -> Tensor:
    """Images of the model's size, or of another."""
    torch.manual_seed(1)
    size = theirs.config.image_size
    size = (size, size) if isinstance(size, int) else size
    shape = rows, theirs.config.num_channels, height or size[0], width or size[1]
    return torch.randn(shape, dtype=torch.float64)


def ended(ids: Tensor, mask: Tensor, end: int) -> Tensor:
    """Texts with the end token in their last place alone."""
    last = torch.where(mask.bool(), torch.arange(ids.shape[1]), -1).amax(1)
    return ids.masked_fill(ids == end, 6).scatter(1, last[:, None], end).where(mask.bool(), ids)


def add_types(config: Any, inputs: Inputs) -> None:
    """Token types, languages and global tokens, where the family has them."""
    ids = inputs["input_ids"]
    if types := getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = (torch.arange(ids.shape[1]) % 3 == 1).long().expand_as(ids) * min(
            types - 1, 1
        )
    if config.model_type == "xlm" and config.n_langs > 1 and config.use_lang_emb:
        inputs["langs"] = torch.randint(config.n_langs, ids.shape, generator=torch.Generator().manual_seed(7))


def positions(theirs: Any, mask: Tensor) -> Inputs | None:
    """Counted from the first real token; RoBERTa's descendants count so themselves."""
    takes = "position_ids" in inspect.signature(theirs.forward).parameters
    counting = (
        "clip_text_model",
        "siglip_text_model",
        "esm",
        "roberta",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "longformer",
        "mpnet",
        "reformer",
    )
    counts_itself = theirs.config.model_type in counting
    return {"position_ids": counted(mask)} if takes and not counts_itself else None


def without_effect(theirs: Any) -> tuple[str, ...]:
    """Parameters that transformers makes and never computes with, or that change no output."""
    names = [name for name, _ in theirs.named_parameters(remove_duplicate=False)]
    config = theirs.config
    dead = []
    if not getattr(config, "tie_word_embeddings", True):
        dead += [name for name in names if f"{name.removesuffix('bias')}decoder.bias" in names]
        dead += ["shared.weight", "model.shared.weight"] if config.is_encoder_decoder else []
    if config.model_type == "reformer":
        dead.append("lm_head.bias")
    if type(theirs).__name__ in ("BartForCausalLM", "BigBirdPegasusForCausalLM"):
        dead += [name for name in names if "encoder_attn" in name]
    # biases of positions as keys move all scores of a query alike: saved as zeros
    dead += [name for name in names if name.endswith("pos_key_proj.bias")]
    if config.model_type == "big_bird":
        dead += [name for name in names if "pooler" in name] if not pools(theirs) else []
    return tuple(dead)


def pools(theirs: Any) -> bool:
    """Whether a class of BERT's descendants computes with its pooler."""
    family = FAMILIES[theirs.config.model_type]
    return type(theirs).__name__.removeprefix(family.class_prefix) in ("Model", "ForPreTraining")
