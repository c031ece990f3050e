"""The attention of a trained model on one text: the data of the page's maps, and a table of them in words."""

import base64
import dataclasses
import html
import json

import torch
from torch import Tensor

from polyformer.cli.plots.report.page import details, table
from polyformer.cli.plots.spectrum import check, matrices
from polyformer.core.errors import InputError
from polyformer.data import Tokenizer
from polyformer.models.architectures.transformer import Transformer
from polyformer.models.config import max_positions

TOKENS = 64
"""The most tokens of a text whose attention is shown."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The attention maps: `weights` [layers, H, n, n] of each token (row) for each token (column)."""

    tokens: list[str]
    weights: Tensor


def attention_maps(model: Transformer, tokenizer: Tokenizer, text: str) -> AttentionMaps | None:
    """Return the self-attention of an encoder or a decoder on the beginning of `text`.

    None for an encoder-decoder, and if attention has no matrix of tokens by tokens.
    """
    if model.encoder is not None and model.decoder is not None:
        return None
    try:
        check(model)
    except InputError:
        return None
    ids, _ = tokenizer.encode_for_model(text)
    if model.decoder is not None and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
    ids = ids[: min(TOKENS, max_positions(model.config) or TOKENS)]
    with torch.no_grad():
        row = {"input_ids": torch.tensor([ids], device=next(model.parameters()).device)}
        (layers,) = matrices(model.eval(), row).values()
    tokens = [tokenizer.decode([number], keep_special=True) for number in ids]
    return AttentionMaps(tokens, torch.stack([layer.float().cpu() for layer in layers]))


def attention_view(maps: AttentionMaps) -> str:
    """Return the parts of the page that its script fills, the data as JSON, and the table."""
    layers, heads = maps.weights.shape[:2]
    weights = base64.b64encode(bytes((maps.weights * 255).round().byte().flatten().tolist())).decode()
    data = json.dumps({"tokens": maps.tokens, "layers": layers, "heads": heads, "weights": weights})
    data = data.replace("<", "\\u003c")  # the text must not end the script element
    return (
        '<div class="heads" id="attention-heads" data-save="attention of every head" role="group" '
        'aria-label="heads: a row for each layer"></div>\n'
        '<div class="split"><div><canvas class="matrix" id="attention-matrix" data-save="attention" '
        'role="img" aria-label="attention matrix of the chosen head: query down, key across"></canvas>'
        "</div>\n"
        '<div><div class="tokens" id="attention-tokens" role="listbox" '
        'aria-label="tokens: choose one to see what it attends to"></div>\n'
        '<output id="attention-said"></output></div></div>\n'
        "<noscript><p>The maps are drawn by a script; the table below needs none.</p></noscript>\n"
        f'<script type="application/json" id="attention-data">{data}</script>\n'
        f"{details('Every head in numbers', attention_table(maps))}"
    )


def attention_table(maps: AttentionMaps) -> str:
    """Return a table by head, means over queries: distance of attention, and its share on three places."""
    n = len(maps.tokens)
    index = torch.arange(n)
    distance = (index.view(-1, 1) - index).abs().float()
    rows: dict[str, list[str]] = {}
    for layer, heads in enumerate(maps.weights, 1):
        for head, weights in enumerate(heads, 1):
            shares = weights.diagonal().mean(), weights.diagonal(-1).mean(), weights[:, 0].mean()
            far = f"{float((weights * distance).sum(-1).mean()):.1f}"
            rows[f"layer {layer}, head {head}"] = [far, *(f"{100 * float(share):.0f} %" for share in shares)]
    return table("", ["mean distance in tokens", "itself", "the token before", "the first token"], rows)


def highlighted(prompt: str, continuation: str) -> str:
    """Return a sample as preformatted text with a highlighted prompt."""
    return f"<pre><b>{html.escape(prompt)}</b>{html.escape(continuation)}</pre>"
