"""The glossaries in both languages have the same terms, and all of a first chapter on Transformers."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")

FIRST_CHAPTER = """
Transformer, attention, self-attention, multi-head attention, cross-attention, query, key, value, encoder,
decoder, tokenizer, token, embedding, vocabulary, loss, cross-entropy, perplexity, gradient, softmax,
residual connection, layer normalization, feed-forward, positional encoding, attention mask, causal, padding,
autoregressive, teacher forcing, greedy, beam search, temperature, top-p, KV cache, epoch, batch,
learning rate, warm-up, dropout, fine-tuning, pretraining, BLEU, FLOPs, context length,
attention weight, attention head, logit, sampling, top-k, language model, encoder-decoder, decoder-only,
subword, byte-pair encoding, special token, prompt, generation, label, label smoothing, optimizer,
hyperparameter, overfitting, regularization, weight decay, training data, validation data, test data,
baseline, inference
"""


def terms(heading: str) -> set[str]:
    """The terms of a heading or a cell, without links and notes."""
    plain = re.sub(r" \(.*?\)", "", LINK.sub(r"\1", heading))
    return {term.strip().lower() for term in plain.split(",")}


def english() -> dict[str, str]:
    """What is said of each term."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    return {term: said for heading, said in entries for term in terms(heading)}


def vietnamese() -> dict[str, str]:
    """The row of each term."""
    text = (DOCS / "vi" / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "tiếng Anh |" not in line]
    return {term: row for row in rows for term in terms(row[2:].split(" | ")[0])}


def test_both_languages_have_the_same_terms():
    assert len(english()) > 120
    assert english().keys() == vietnamese().keys()


@pytest.mark.parametrize("entries", [english, vietnamese])
def test_every_term_of_a_first_chapter_is_explained_with_a_link(entries):
    known = entries()
    names = terms(FIRST_CHAPTER.replace("\n", " "))
    assert names <= known.keys(), names - known.keys()
    assert not [name for name in names if not LINK.search(known[name])]


@pytest.mark.parametrize("page", ["glossary.md", "vi/glossary.md"])
def test_its_links_exist(page: str):
    text = (DOCS / page).read_text(encoding="utf-8")
    anchors = {heading.lower().replace(",", "").replace(" ", "-") for heading in re.findall("## (.*)", text)}
    for _, link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        assert (DOCS / page).parent.joinpath(path).exists() if path else anchor in anchors, link
