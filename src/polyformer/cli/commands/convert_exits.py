"""`polyformer convert --fit`: fit the exits of a decoder to a text in closed form."""

import sys
from typing import TYPE_CHECKING

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.models.architectures import Transformer

FIT_LENGTH = 256
"""Tokens per row of the text that exits are fitted to."""


def fit(model: "Transformer", folder: str, text: str, tokens: int) -> None:
    """Fit the exits of `model` to a text in place, with the tokenizer in `folder`; print the remaining
    errors.
    """
    from polyformer.applications.exits.fitting import fit_exits, fittable_exits
    from polyformer.cli.commands.model_and_texts import ModelAndTexts, token_rows
    from polyformer.data import DataConfig
    from polyformer.data.tokenizer_loading import load_tokenizer

    fittable_exits(model)
    if tokens < 2 * FIT_LENGTH:
        raise InputError(f"--fit-tokens: expected {2 * FIT_LENGTH} or more, got {tokens}")
    source = ModelAndTexts(model, load_tokenizer(folder), DataConfig(path=text), ("text",))
    rows = token_rows(source, "text", FIT_LENGTH, tokens // FIT_LENGTH)

    def show(read: int) -> None:
        print(f"\r{read:,} of {len(rows) * FIT_LENGTH:,} tokens", end="", file=sys.stderr, flush=True)

    fitted = fit_exits(model, rows, show)
    print(file=sys.stderr)
    for exit in fitted:
        print(
            f"exit after layer {exit.layer}: divergence from the last layer on held-out rows "
            f"{exit.divergence:.3f} nats, before the fit {exit.before:.3f} (ridge {exit.ridge:g})"
        )
