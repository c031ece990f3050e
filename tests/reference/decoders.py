"""What a decoder does beyond one pass, compared with transformers: losses, caches and generation."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from families import Inputs, at_real, counted, same, shaken, texts, verify
from torch import Tensor

import polyformer
from polyformer.architecture import ModelConfig
from polyformer.checkpoints import FAMILIES
from polyformer.generation.hub import from_hub
from polyformer.model import Transformer
from polyformer.presets import model_config

PAD = 0


class Double:
    """torch for a module of theirs that computes scores in float32 in every precision: here in float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Theirs without its cast to float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def labelled(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Labels of the real tokens for us and for transformers, which predicts a text's first token too where
    padding stands before it."""
    mask = inputs["attention_mask"]
    ours = inputs["input_ids"].masked_fill(mask == 0, -100)
    first = mask.diff(prepend=torch.ones_like(mask[:, :1]), dim=1) > 0
    return {"labels": ours}, {"labels": ours.masked_fill(first, -100)}


def verify_decoder(theirs: Any, folder: Path, side: str, **options: Any) -> Transformer:
    """`verify` with the labels of a language model, where `theirs` is one."""
    inputs = texts(theirs.config.vocab_size, pad=PAD, side=side)
    mask = inputs["attention_mask"]
    if "labels" not in options and hasattr(theirs, "lm_head"):
        theirs.loss_function = exact_loss
        options["labels"], options["their_labels"] = labelled(inputs)
    for kind in ("labels", "their_labels"):
        tags = options.get(kind, {}).get("labels")
        if tags is not None and tags.shape == mask.shape:  # of real tokens alone
            options[kind] = {"labels": tags.masked_fill(mask == 0, -100)}
    positions = {"position_ids": counted(mask)}
    return verify(theirs, inputs, folder, **{"only_theirs": positions, **options})


@torch.no_grad()
def verify_writer(theirs: Any, folder: Path) -> None:
    """Attention weights, chunks with a cache, and texts, greedy and by beams, of a language model."""
    theirs = shaken(theirs, 0.8)
    theirs.save_pretrained(folder)
    ours = polyformer.from_pretrained(folder)
    verify_attentions(ours, theirs)
    verify_cache(ours, theirs)
    verify_generation(ours, theirs)
    verify_generation(ours, theirs, num_beams=3)


def verify_attentions(ours: Transformer, theirs: Any, side: str = "left") -> None:
    """Every layer's weights [B, H, Tq, Tk] at the real queries; `theirs` computes them in full."""
    inputs = texts(ours.config.vocab_size, pad=PAD, side=side)
    mask = inputs["attention_mask"]
    mine = ours(**inputs, output_attentions=True).attentions
    other = theirs(**inputs, position_ids=counted(mask), output_attentions=True).attentions
    for a, b in zip(mine, other, strict=True):
        same(at_real(a.transpose(1, 2), mask), at_real(b.transpose(1, 2), mask))


@torch.no_grad()
def verify_cache(ours: Transformer, theirs: Any, side: str = "left") -> None:
    """Chunks of several sizes with the cache are one pass of theirs."""
    inputs = texts(ours.config.vocab_size, pad=PAD, side=side)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected = theirs(**inputs, position_ids=counted(mask)).logits
    for sizes in ([1] * 11, [4, 7], [3, 1, 5, 2]):
        state, actual, start = None, [], 0
        for part in ids.split(sizes, 1):
            stop = start + part.shape[1]
            output = ours(part, attention_mask=mask[:, start:stop], state=state, use_cache=True)
            state, start = output.state, stop
            actual.append(output.logits)
        same(at_real(torch.cat(actual, 1), mask), at_real(expected, mask))


def verify_generation(ours: Transformer, theirs: Any, **options: Any) -> None:
    """Texts of rows padded on the left, token for token; greedy ones unless `options` say otherwise.

    Small models repeat themselves: a second text, in which no token may come twice, depends on all of them.
    Without an end, and without the pad token, which theirs counts among a text's tokens.
    """
    inputs = texts(ours.config.vocab_size, pad=PAD, side="left")
    eos = ours.config.special.eos
    for more in ({}, {"no_repeat_ngram_size": 1, "suppress_tokens": [PAD, eos]}):
        wanted = {"max_new_tokens": 6, "pad_token_id": PAD, "do_sample": False, **options, **more}
        actual = ours.generate(inputs["input_ids"], inputs["attention_mask"], from_hub(wanted)).sequences
        expected = theirs.generate(**inputs, **wanted)
        assert ended(actual[:, 11:], eos) == ended(expected[:, 11:], eos)
    assert len(actual[:, 11:].unique()) > 4, "the texts are too much the same to compare"


def ended(tokens: Tensor, eos: int | None) -> list[list[int]]:
    """Texts up to their ends, whatever fills the rows after them."""
    rows = tokens.tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in rows]


def read_config(theirs: Any, **options: Any) -> ModelConfig:
    """Ours of their configuration with some `options` changed."""
    hub = {**theirs.to_dict(), **options}
    family = FAMILIES[hub["model_type"]]
    return family.config(hub, family.task(hub, None))


def counts(preset: str, config: Any) -> tuple[int, int]:
    """Parameters of our preset and of their class of the same task; theirs, made from `config` and from what
    we say of the preset, are the same. None is given memory."""
    ours = model_config(preset)
    family = FAMILIES[config.model_type]
    described, task = family.hub_config(ours)
    head = getattr(transformers, family.class_prefix + task)
    with torch.device("meta"):
        models = Transformer(ours), head(config), head(type(config)(**described))
    own, theirs, again = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert theirs == again
    return own, theirs
