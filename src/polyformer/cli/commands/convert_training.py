"""Training that is part of a conversion: exits fitted in closed form, and a new attention that learns."""

import sys
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.models.architectures import Transformer

FIT_LENGTH = 256
"""Tokens per row of the text that exits are fitted to."""


def fit(options: Any, model: "Transformer") -> None:
    """Fit the exits of `model` to the text --fit in place; print the errors left."""
    from polyformer.applications.exit_fitting import fit_exits, fittable_exits

    fittable_exits(model)
    if options.fit_tokens < 2 * FIT_LENGTH:
        raise InputError(f"--fit-tokens: expected {2 * FIT_LENGTH} or more, got {options.fit_tokens}")
    rows = rows_of_text(model, options.folder, options.fit, FIT_LENGTH, options.fit_tokens)

    def show(read: int) -> None:
        print(f"\r{read:,} of {len(rows) * FIT_LENGTH:,} tokens", end="", file=sys.stderr, flush=True)

    fitted = fit_exits(model, rows, show)
    print(file=sys.stderr)
    for exit in fitted:
        print(
            f"exit after layer {exit.layer}: divergence from the last layer on held-out rows "
            f"{exit.divergence:.3f} nats, before the fit {exit.before:.3f} (ridge {exit.ridge:g})"
        )


TRANSFER_LENGTH = 512
"""Tokens per row of the text that a new attention learns from."""


def learn_attention(options: Any, old: "Transformer", new: "Transformer") -> "Transformer":
    """Return `new` after attention transfer from `old` and low-rank tuning on a text; print the losses."""
    from polyformer.applications.linearizing import Steps, check_tunable, transfer_attention, tune_low_rank
    from polyformer.training.recipes.run import choose_device

    # The transfer takes minutes, so a model that cannot be tuned is refused before it.
    if options.tune_tokens:
        check_tunable(new)
    longest = max(options.transfer_tokens, options.tune_tokens)
    rows = rows_of_text(new, options.folder, options.transfer, TRANSFER_LENGTH, longest)
    device = choose_device("auto")
    old, new = old.to(device), new.to(device)

    def show(read: int, loss: float) -> None:
        print(f"\r{read:,} tokens, loss {loss:.3f} ", end="", file=sys.stderr, flush=True)

    steps = Steps(rows, options.transfer_tokens, precision=options.precision)
    losses = transfer_attention(old, new, steps, show)
    print(file=sys.stderr)
    worst = max(range(len(losses)), key=losses.__getitem__)
    mean = sum(losses) / len(losses)
    print(f"attention transfer: error {mean:.3f} of the old output, {losses[worst]:.3f} in layer {worst}")
    if options.tune_tokens:
        new = tune_low_rank(new, Steps(rows, options.tune_tokens, precision=options.precision), show)
        print(file=sys.stderr)
    old.cpu()
    return new.cpu()


def rows_of_text(model: "Transformer", folder: str, text: str, length: int, tokens: int) -> list[list[int]]:
    """Return rows of `length` tokens, at most `tokens` in all, of a text by the tokenizer in `folder`."""
    from polyformer.cli.commands.model_and_texts import ModelAndTexts, token_rows
    from polyformer.data import DataConfig
    from polyformer.data.tokenizers.loading import load_tokenizer

    source = ModelAndTexts(model, load_tokenizer(folder), DataConfig(path=text), ("text",))
    return token_rows(source, "text", length, max(1, tokens // length))
