"""A checkpoint as the commands use it: what a task does with a trained model, without a recipe.

What a text becomes is said by the tokenizer (`encode_for_model`), what the labels are called by config.json.
A model of ours beside a tokenizer without marks reads what our tasks give it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyformer.architecture import ModelConfig, longest
from polyformer.checkpoints import config_of, from_pretrained
from polyformer.core.errors import InputError, quote
from polyformer.data import Collate, Tokenizer
from polyformer.data.answers import encode_marked, marked_windows
from polyformer.data.tokenizer_loading import load_tokenizer
from polyformer.heads import ClassifyConfig, TagConfig
from polyformer.model import Transformer
from polyformer.tasks.choose import packed, shares_of_choices
from polyformer.tasks.qa import AnsweringConfig, answers
from polyformer.tasks.text import batched, required

COMMANDS = {"choose": "choose", "classify": "classify", "tag": "tag", "span": "answer"}
"""Which command a head is for; a language model's depends on its stacks."""

KINDS = {"answer": "qa", "generate": "lm"}
"""The kind of task where it is not called as the command."""

MARKS = {"generate": ("{bos} $A", "{bos} $A $B"), "translate": ("$A {eos}", "$A $B {eos}")}
LABELLED = "{cls} $A {sep}", "{cls} $A {sep} $B:1 {sep}:1"
"""What our tasks' models read, for one text and for two."""


class Reader:
    """The `model` in `folder` and its `tokenizer`, for the command `wanted`.

    Raises `InputError` for a model with another head, and where there is no tokenizer.
    """

    batch_tokens = 4096

    def __init__(self, folder: Path, wanted: str, device: torch.device):
        config = config_of(folder)
        check_head(folder, config, wanted)
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        if config.origin is None and self.tokenizer.backend.post_processor is None:
            mark(self.tokenizer, *MARKS.get(wanted, LABELLED))
        self.model = from_pretrained(folder).to(device)
        self.config, self.fields = config, config.origin.fields if config.origin else {}
        self.language: str | None = None  # of the texts
        special = config.special
        pads = (special.pad, self.tokenizer.pad_id, 0)
        self.collate = Collate(next(token for token in pads if token is not None))
        firsts = (self.tokenizer.bos_id, special.bos, special.eos, 0)
        self.first = next(token for token in firsts if token is not None)  # stands where a text has no token

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text with its marks; raises `InputError` for one longer than the model takes."""
        encoded = self.tokenizer.encode_batch_for_model(texts, language=self.language)
        return [self.checked(text, ids) for text, (ids, _) in zip(texts, encoded)]

    def _encode_pairs(self, texts: Sequence[str], pairs: Sequence[str]) -> list[dict[str, list[int]]]:
        encoded = self.tokenizer.encode_batch_for_model(texts, pairs, language=self.language)
        typed = self.config.embedding.type_vocab_size > 1
        return [
            {"input_ids": self.checked(text, ids), **({"token_type_ids": types} if typed else {})}
            for text, (ids, types) in zip(texts, encoded)
        ]

    def checked(self, text: str, ids: list[int]) -> list[int]:
        """The ids of a text, if the model takes so many; of no text at least one."""
        limit = longest(self.config)
        if limit is not None and len(ids) > limit:
            raise InputError(
                f"text ({quote(text)}) has {len(ids)} tokens, and {self.folder} takes {limit}; shorten it, "
                f"or make a model for more by polyformer convert {self.folder} OUT --max-positions {len(ids)}"
            )
        return ids or [self.first]

    @torch.no_grad()
    def classify(
        self, model: Transformer, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> list[dict[str, float]]:
        """For every text, or text and its pair, the probability of each label; of a model of numbers the
        numbers."""
        head = self.config.head
        assert isinstance(head, ClassifyConfig)
        labels, scores = self._labels(head), [{}] * len(texts)
        rows: Sequence[Any] = self.encode(texts) if pairs is None else self._encode_pairs(texts, pairs)
        for chosen, batch in batched(model, rows, self.collate, self.batch_tokens):
            shares = model(**batch).logits
            if head.problem == "multi_label":
                shares = shares.sigmoid()
            elif head.problem != "regression" and len(labels) > 1:
                shares = shares.softmax(-1)
            for i, share in zip(chosen, shares.tolist()):
                scores[i] = dict(zip(labels, share))
        return scores

    def choose(self, model: Transformer, questions: Sequence[Mapping[str, Any]]) -> list[list[float]]:
        """For every {text, choices} the probability of each choice."""
        texts = [(question["text"], question["choices"]) for question in questions]
        pad = self.collate.pad_id
        rows = [packed(self._encode_pairs([text] * len(choices), choices), pad) for text, choices in texts]
        return shares_of_choices(model, rows, pad, self.batch_tokens)

    @torch.no_grad()
    def tag(self, model: Transformer, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """The tag of every word of every sentence: that of its first token, and where the tokenizer keeps
        nothing of a word, of the sentence's first token."""
        head, texts = self.config.head, [" ".join(words) for words in sentences]
        assert isinstance(head, TagConfig)
        labels, encoded = self._labels(head), encode_marked(self.tokenizer, texts)
        rows = [self.checked(text, encoding.ids) for text, encoding in zip(texts, encoded)]
        tags: list[list[str]] = [[]] * len(sentences)
        for chosen, batch in batched(model, rows, self.collate, self.batch_tokens):
            for i, guess in zip(chosen, model(**batch).logits.argmax(-1).tolist()):
                places = word_places(sentences[i], encoded[i].offsets)
                tags[i] = [labels[guess[place]] for place in places]
        return tags

    def answer(self, model: Transformer, rows: Sequence[Mapping[str, str]]) -> list[str]:
        """The answer to each row's question, a piece of its context, read in windows."""
        usual, typed = AnsweringConfig(), self.config.embedding.type_vocab_size > 1
        length = min(usual.max_length, longest(self.config) or usual.max_length)
        questions, contexts = ([row[name] for row in rows] for name in ("question", "context"))
        encoded = []
        for pair in encode_marked(self.tokenizer, questions, contexts):
            windows = marked_windows(pair, length=length, stride=usual.stride, typed=typed)
            encoded.append((windows, [at for at, side in zip(pair.offsets, pair.sequence_ids) if side == 1]))
        return answers(model, [dict(row) for row in rows], encoded, usual, self.collate)

    def _labels(self, head: ClassifyConfig | TagConfig) -> list[str]:
        """The names of the labels by their numbers; LABEL_0, ... where there are none."""
        names = {int(number): name for number, name in (self.fields.get("id2label") or {}).items()}
        return [names.get(number, f"LABEL_{number}") for number in range(head.num_labels)]


def command_of(config: ModelConfig) -> str | None:
    """The command that a model's head is for."""
    if config.head.kind in ("language_model", "adaptive_softmax") and config.decoder is not None:
        return "generate" if config.encoder is None else "translate"
    return COMMANDS.get(config.head.kind)


def check_head(folder: Path, config: object, wanted: str) -> None:
    """Raises `InputError` for a model that is not for the command `wanted`."""
    if not isinstance(config, ModelConfig):
        raise InputError(f"{folder}: not a model of texts")
    command = command_of(config)
    if command != wanted:
        way = (
            f"use polyformer {command}"
            if command
            else (
                f"train one from it by polyformer train --pretrained {folder} "
                f"--task.kind {KINDS.get(wanted, wanted)}"
            )
        )
        raise InputError(
            f"{folder}: its head is {quote(config.head.kind)}, with which it cannot {wanted}; {way}"
        )


def mark(tokenizer: Tokenizer, single: str, pair: str) -> None:
    """Let `tokenizer` encode for a model with these marks, written by their roles."""
    from tokenizers import processors

    roles = [role for role in ("bos", "eos", "cls", "sep") if f"{{{role}}}" in single]
    ids = {role: required(getattr(tokenizer, f"{role}_id"), f"<{role}>") for role in roles}
    names = {role: tokenizer.token(number) for role, number in ids.items()}
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=single.format(**names),
        pair=pair.format(**names),
        special_tokens=[(names[role], ids[role]) for role in roles],
    )


def word_places(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """The first token of each of the words that single spaces join, the space before it with it; 0 for one
    without. `offsets` are the tokens' characters, none for marks."""
    places, start = [], 0
    for word in words:
        stop = start + len(word)
        places.append(next((i for i, (a, b) in enumerate(offsets) if a < stop and b >= start and b > a), 0))
        start = stop + 1
    return places
