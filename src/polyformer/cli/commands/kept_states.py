"""`polyformer generate --save-state FILE` and `--state FILE`: read a prompt once, continue it many times."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import refuse
from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.models.architectures import Transformer
    from polyformer.models.generation import GenerationConfig
    from polyformer.models.generation.kept_text import KeptText
    from polyformer.nn.cache import CachePolicy

REFUSED = ("draft", "datastore", "frozen", "compile", "num_beams", "penalty_alpha")


def write_with_state(
    options: Any,
    task: Any,
    model: "Transformer",
    config: "GenerationConfig",
    starts: Iterable[Any],
    printer_after: Callable[[str], Callable[[str], None]],
) -> None:
    """Print prompts and their continuations, with a state that is read from a file or written to one.

    options: of the command `generate`. starts: the tokens of each prompt and its printed part.
    printer_after: returns a function that prints pieces of a text after the printed part.
    """
    from polyformer.models.generation import TextStreamer
    from polyformer.models.generation.kept_text import KeptText
    from polyformer.models.generation.saved_text import load_state, save_state

    refuse(options, REFUSED, "not available with --state and --save-state; leave it out")
    if options.state is not None:
        refuse(options, ("save_state",), "not available with --state; leave out one of them")
    starts = list(starts)
    if options.save_state is not None and len(starts) > 1:
        raise InputError(f"--save-state: expected one text, as a state is of one, got {len(starts)}")
    decode = task.tokenizer.decode
    for number, start in enumerate(starts):
        if number:
            print()
        if options.state is not None:
            text = load_state(options.state, model)
            config = replace(config, cache=_policy_of(options, text))
            _check_beginning(options.state, start.ids, text.ids)
        else:
            assert options.save_state is not None
            if len(start.ids) < 2:
                raise InputError("--save-state: expected a text of 2 tokens or more; add --prompt or --file")
            text = KeptText(model)
            # Without the last token, which the continuation reads, as not every state can remove it.
            text.read(start.ids[:-1], config.cache)
            save_state(text, options.save_state)
        show = printer_after(start.shown)
        streamer = TextStreamer(decode, config.stop, show)
        text.generate(start.ids, config, streamer, decode)
        streamer.finish()
        show("\n")


def _policy_of(options: Any, text: "KeptText") -> "CachePolicy | None":
    """Return the cache policy of a state; raise `InputError` for another in the options."""
    from polyformer.nn.cache import CachePolicy

    if options.cache is not None and CachePolicy.from_dict(options.cache, "cache") != text.policy:
        raise InputError(
            f"--cache: expected the policy with which {options.state} was read, got {quote(options.cache)}; "
            "leave it out"
        )
    return text.policy


def _check_beginning(file: str, ids: list[int], read: list[int]) -> None:
    """Raise `InputError` unless a text begins with the tokens of a state and has more."""
    shared = next((i for i, (a, b) in enumerate(zip(ids, read)) if a != b), min(len(ids), len(read)))
    if shared < len(read) or len(ids) == len(read):
        raise InputError(
            f"--state: expected a text that begins with the {len(read)} tokens of {file} and goes on, got "
            f"{len(ids)} tokens, of which the first {shared} are the same; repeat the text of --save-state"
        )
