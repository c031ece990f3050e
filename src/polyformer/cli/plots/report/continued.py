"""Examples of language models: texts of the validation data, continued by the model and as they continue."""

import html
from collections.abc import Sequence
from itertools import accumulate

import torch

from polyformer.cli.plots.report.held import HeldOutRows
from polyformer.cli.plots.report.page import section
from polyformer.models.generation import GenerationConfig, SamplingConfig

PLACES, PROMPT, NEW = 3, 48, 80
"""The number of texts, and the tokens of a text that the model reads and that it writes."""


def continued_texts(held: HeldOutRows) -> str:
    """Return beginnings of validation texts with their continuations, sampled with the seed of the run."""
    task, model = held.task, held.model
    decode, start = task.tokenizer.decode, task.start("")
    room = model.config.max_position_embeddings - len(start)
    blocks = []
    for excerpt in excerpts(task.encoded(held.rows), min(PROMPT + NEW, room)):
        ids = [*map(int, excerpt)]
        known = max(1, min(PROMPT, len(ids) // 2))
        prompt, rest = decode(ids[:known]), decode(ids[known:])
        drawing = SamplingConfig(do_sample=True, temperature=0.7, top_p=0.95, seed=held.seed)
        config = GenerationConfig(max_new_tokens=max(1, min(NEW, room - known)), sampling=drawing)
        read = torch.tensor([[*start, *ids[:known]]])  # tokens, as a part of a text may have other tokens
        continuation = model.generate(read, None, config, None, decode).texts(decode)[0]
        blocks.append(
            f"<h3>Text {len(blocks) + 1}</h3>"
            f'<pre dir="auto"><b>{html.escape(prompt)}</b>{html.escape(continuation)}</pre>\n'
            f'<p class="soft">The text itself continues:</p><pre dir="auto">{html.escape(rest)}</pre>'
        )
    text = (
        f"Texts at {PLACES} evenly spaced places of the validation data. Blue is what the model has read; "
        "the rest is sampled at temperature 0.7."
    )
    return section("Examples", text, *blocks) if blocks else ""


def excerpts(documents: Sequence[Sequence[int]], length: int) -> list[Sequence[int]]:
    """Return at most `length` tokens at each of `PLACES` evenly spaced places of the documents.

    An excerpt begins with its document, unless the document is long enough to be entered at the place itself.
    """
    documents = [document for document in documents if len(document) > 1]
    ends = [*accumulate(map(len, documents))]
    chosen = {}
    for place in range(PLACES if ends else 0):
        at = place * ends[-1] // PLACES
        number = next(number for number, end in enumerate(ends) if at < end)
        document = documents[number]
        inside = at - (ends[number] - len(document))
        start = inside if inside + length <= len(document) else 0
        chosen.setdefault((number, start), document[start : start + length])
    return list(chosen.values())
