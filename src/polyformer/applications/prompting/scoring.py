"""Answers to questions: the most likely of several, or generated texts; and their metrics.

    score(answer) = log P(answer | prompt) = sum over the answer's tokens of log P(token | all before)

optionally divided by its number of tokens or bytes, because a longer answer is less probable due to its
length. A prompt and its answers are tokenized together. The answers begin at the first token in which any of
them differs from the prompt, so that all answers to a question are scored after the same tokens. Brown et al.
2020, section 2.4.

`log_likelihoods_definition` reads every text separately. `log_likelihoods` reads the common prefix of all
texts (the demonstrations) once, continues from that state in batches, and reads texts that differ only in
their last token (answers of one token) once.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polyformer.applications.prompting.questions import Example
from polyformer.applications.prompting.template import Template
from polyformer.core.errors import InputError, quote
from polyformer.core.evaluation_mode import evaluating
from polyformer.data import by_tokens
from polyformer.data.formats.questions_and_summaries import exact_match, f1
from polyformer.models.architectures import Transformer
from polyformer.models.generation import Decode, GenerationConfig

Normalize = Literal["none", "tokens", "bytes"]

BATCH_TOKENS = 4096  # tokens per batch, including the common prefix in each row


class Continuation(NamedTuple):
    """Token ids, and the index of the first token to score; at least one token precedes it."""

    ids: list[int]
    start: int


@torch.no_grad()
def log_likelihoods_definition(model: Transformer, rows: Sequence[Continuation]) -> list[float]:
    """Return log P of the tokens of each row from its `start` on, by one pass per row."""
    device, scores = next(model.parameters()).device, []
    with evaluating(model):
        for ids, start in rows:
            log_p = model(torch.tensor([ids], device=device)).logits[0].double().log_softmax(-1)
            scores.append(math.fsum(float(log_p[i - 1, ids[i]]) for i in range(start, len(ids))))
    return scores


@torch.no_grad()
def log_likelihoods(
    model: Transformer, rows: Sequence[Continuation], batch_tokens: int = BATCH_TOKENS
) -> list[float]:
    """Return the same, reading the common prefix of the rows only once."""
    if not rows:
        return []
    device = next(model.parameters()).device
    shared = _shared([ids for ids, _ in rows], min(start for _, start in rows) - 1)
    inputs = [tuple(ids[shared:-1]) for ids, _ in rows]
    texts = sorted({*inputs})
    users: dict[tuple[int, ...], list[int]] = {text: [] for text in texts}
    for row, text in enumerate(inputs):
        users[text].append(row)
    scores = [0.0] * len(rows)
    with evaluating(model):
        state = None
        if shared:
            state = model(torch.tensor([rows[0].ids[:shared]], device=device), use_cache=True).state
        lengths = torch.tensor([[shared + len(text)] for text in texts]).numpy()
        most = max(batch_tokens, int(lengths.max()))
        for numbers in by_tokens(lengths, None, max_tokens=most):
            batch = [texts[number] for number in numbers]
            ids = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.long, device=device)
            mask = torch.zeros_like(ids)
            for i, text in enumerate(batch):
                ids[i, : len(text)] = torch.tensor(text, device=device)
                mask[i, : len(text)] = 1
            before = None if state is None else state.reorder(ids.new_zeros(len(batch)))
            hidden = model(ids, mask, state=before).last_hidden_state
            for i, text in enumerate(batch):
                for row, score in _scored(model, hidden[i], users[text], rows, shared):
                    scores[row] = score
    return scores


def _scored(
    model: Transformer, hidden: Tensor, users: Sequence[int], rows: Sequence[Continuation], shared: int
) -> list[tuple[int, float]]:
    """Return (row, score) of rows with the same input; `hidden` [T, E] begins after the prefix `shared`."""
    first = min(rows[row].start for row in users) - 1 - shared
    last = len(rows[users[0]].ids) - 1 - shared  # equal for all of these rows
    log_p = model.predictions(hidden[None, first:last])[0].double().log_softmax(-1)
    scores = []
    for row in users:
        ids, start = rows[row]
        places = range(start - 1 - shared - first, last - first)
        scores.append((row, math.fsum(float(log_p[at, ids[shared + first + at + 1]]) for at in places)))
    return scores


def _shared(rows: Sequence[list[int]], most: int) -> int:
    """Return the length of the common prefix of all rows, at most `most`."""
    first, last = min(rows), max(rows)  # the prefix of the least and the greatest row is common to all
    return next((i for i in range(most) if first[i] != last[i]), most)


def continuations(
    start: Callable[[str], list[int]], context: str, template: Template, example: Example
) -> list[Continuation]:
    """Return a row for each choice of a question after the text `context`.

    `start` returns the ids of a text at the beginning of a document. Raises `InputError` if no token precedes
    the answers.
    """
    prompt = start(context + template.question(example))
    answers = [start(context + template.question(example, choice)) for choice in example.choices]
    place = _shared([prompt, *answers], min(map(len, [prompt, *answers])))
    place = min(place, *(len(answer) - 1 for answer in answers))
    if place < 1:
        raise InputError(
            f"template: no token precedes the answers to {quote(example.input)}; put more text before "
            "{target}"
        )
    return [Continuation(answer, place) for answer in answers]


def choose_answers(
    model: Transformer,
    rows: Sequence[Sequence[Continuation]],
    questions: Sequence[Example],
    normalize: Normalize = "none",
) -> list[dict[str, float]]:
    """Return the score of each choice of each question; the first maximum is the answer."""
    scores = iter(log_likelihoods(model, [row for several in rows for row in several]))
    results = []
    for several, example in zip(rows, questions, strict=True):
        sizes = {
            "none": [1] * len(several),
            "tokens": [len(row.ids) - row.start for row in several],
            "bytes": [len(choice.encode()) for choice in example.choices],
        }[normalize]
        results.append({choice: next(scores) / size for choice, size in zip(example.choices, sizes)})
    return results


def write_answers(
    model: Transformer,
    prompts: Sequence[list[int]],
    decode: Decode,
    *,
    stop: str,
    max_new_tokens: int,
    batch_tokens: int = BATCH_TOKENS,
    cache: str | None = None,
) -> list[str]:
    """Return the text after each of the `prompts` (token ids), by greedy decoding up to a stop text.

    cache: a cache policy, as in `generate`.
    """
    config = GenerationConfig(max_new_tokens=max_new_tokens, stop=(stop,) if stop else ())
    config = dataclasses.replace(config, cache=cache)
    device, pad = next(model.parameters()).device, model.config.special.pad or 0
    answers = [""] * len(prompts)
    lengths = torch.tensor([[len(prompt) + max_new_tokens] for prompt in prompts]).numpy()
    for numbers in by_tokens(lengths, None, max_tokens=max(batch_tokens, int(lengths.max()))):
        batch = [prompts[number] for number in numbers]
        width = max(map(len, batch))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in batch], device=device)
        real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        generated = model.generate(ids, real.to(device), config, None, decode)
        for number, text in zip(numbers, generated.texts(decode, config.stop)):
            answers[number] = text.strip()
    return answers


def choice_metrics(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Return accuracy, f1_macro and majority.

    f1_macro is the mean F1 over the targets. majority is the share of the most frequent target, the accuracy
    of always answering with it.
    """
    right = Counter(target for answer, target in zip(answers, targets) if answer == target)
    guessed, true = Counter(answers), Counter(targets)
    names = {*guessed, *true}
    return {
        "accuracy": right.total() / len(targets),
        "f1_macro": sum(2 * right[name] / (guessed[name] + true[name]) for name in names) / len(names),
        "majority": max(true.values()) / len(targets),
        "questions": len(targets),
    }


def text_metrics(answers: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Return exact_match and f1 of words as in SQuAD: without case, punctuation and articles."""
    pairs = list(zip(answers, targets, strict=True))
    return {
        "exact_match": sum(exact_match(answer, [target]) for answer, target in pairs) / len(pairs),
        "f1": sum(f1(answer, [target]) for answer, target in pairs) / len(pairs),
        "questions": len(pairs),
    }
