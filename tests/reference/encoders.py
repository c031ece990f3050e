"""One encoder's class in transformers and ours, checked with labels of the kind that its head takes."""

import importlib
from pathlib import Path
from typing import Any

import torch
from families import counted, texts, verify
from torch import Tensor, nn

from polyformer.checkpoints import FAMILIES
from polyformer.model import Transformer
from polyformer.presets import model_config

VOCAB, LENGTH = 23, 11
HEADS = (
    "Model",
    "ForMaskedLM",
    "ForTokenClassification",
    "ForSequenceClassification",
    "ForQuestionAnswering",
)
"""What most families have."""

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


def verify_encoder(
    head: str,
    options: dict[str, Any],
    folder: Path,
    *,
    side: str = "right",
    problem: str = "one",
    types: int = 0,
    positions: bool = True,
    dead: tuple[str, ...] = (),
) -> Transformer:
    """One class with one configuration.

    side: of the padding; a question's answer is looked for in texts without, as transformers takes padding
    for a place where it could stand. problem: what labels of texts are. types: how many token types there
    are. positions: whether transformers needs `position_ids`.
    """
    own = importlib.import_module("transformers")
    kind = getattr(own, head)
    numbered = PROBLEMS[problem] if head.endswith("SequenceClassification") else {}
    numbered = {"num_labels": 5} if head.endswith("TokenClassification") else numbered
    config = kind.config_class(**{**options, **numbered})
    torch.manual_seed(7)
    lengths = (11, 11, 11) if head.endswith(("QuestionAnswering", "AnsweringSimple")) else (11, 8, 3)
    inputs = texts(VOCAB, lengths, pad=config.pad_token_id, side=side)
    if types:
        inputs["token_type_ids"] = (torch.arange(LENGTH) % 3 == 1).long().expand(3, -1) * (types - 1)
    mine, theirs = labels(head, inputs["attention_mask"], problem)
    return verify(
        kind(config),
        inputs,
        folder,
        labels=mine,
        their_labels=theirs,
        dead=dead,
        only_theirs={"position_ids": counted(inputs["attention_mask"])} if positions else None,
    )


def labels(head: str, mask: Tensor, problem: str) -> tuple[Any, Any]:
    """Ours, and transformers' where they have other names."""
    tokens = TOKENS.masked_fill(mask == 0, -100)
    if head.endswith("SequenceClassification"):
        return {"labels": TOPICS[problem]}, None
    if head.endswith("TokenClassification"):
        return {"labels": tokens.clamp_max(4)}, None
    if head.endswith(("MaskedLM", "LMHeadModel")):
        return {"labels": tokens}, None
    if head.endswith(("QuestionAnswering", "AnsweringSimple")):
        spans = torch.tensor([[0, 4], [3, 3], [9, 10]])
        return {"labels": spans}, {"start_positions": spans[:, 0], "end_positions": spans[:, 1]}
    return None, None


def counts(preset: str, head: str, **options: Any) -> tuple[int, int]:
    """Parameters of our preset, and of transformers' class with the configuration that it becomes."""
    own = importlib.import_module("transformers")
    kind = getattr(own, head)
    config = model_config(preset)
    family = FAMILIES[kind.config_class.model_type]
    hub, _ = family.hub_config(config)
    with torch.device("meta"):
        mine, theirs = Transformer(config), kind(kind.config_class(**{**hub, **options}))
    return number(mine), number(theirs)


def number(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
