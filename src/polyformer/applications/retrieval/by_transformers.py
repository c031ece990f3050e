"""Generation by models that only transformers can load, with their nearest neighbours mixed in.

The mixture replaces the logits in the output of the model's own forward pass. Therefore all search strategies
of transformers' `generate` use it, before any logits processor, as in our own `generate`.
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.applications.retrieval.mixture import Mixture
from polyformer.applications.retrieval.readers import TransformersReader
from polyformer.core.errors import InputError
from polyformer.models.generation import ContinuedText, TextStreamer

NEW_TOKENS = 64  # new tokens if neither the user nor the checkpoint sets their number


@contextlib.contextmanager
def mixed_in(model: Any, mixture: Mixture) -> Iterator[None]:
    """Replace the logits of a transformers model by log p of the next token, within the context."""

    def ask(module: Any, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, {**named, "output_hidden_states": True}

    def mix(module: Any, arguments: Any, output: Any) -> Any:
        output.logits = mixture(output.logits[:, -1:], output.hidden_states[-1][:, -1:])
        return output

    hooks = model.register_forward_pre_hook(ask, with_kwargs=True), model.register_forward_hook(mix)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Streamer:
    """A streamer of transformers that passes on the new tokens [1] without the prompt that precedes them."""

    def __init__(self, show: Callable[[Tensor], None]):
        self.show, self.prompt_seen = show, False

    def put(self, tokens: Tensor) -> None:
        """Receive the prompt [1, T], then each new token [1]."""
        if self.prompt_seen:
            self.show(tokens)
        self.prompt_seen = True

    def end(self) -> None:
        """Mark the end of the tokens."""


def generate(
    reader: TransformersReader,
    mixture: Mixture,
    prompt: str,
    settings: Mapping[str, Any],
    stop: Sequence[str] = (),
    show: Callable[[Tensor], None] | None = None,
) -> list[int]:
    """Return the tokens that follow `prompt`, by transformers' `generate` with its `settings` and a `seed`.

    Settings that are absent come from the checkpoint. The text ends after any of `stop`. `show` receives each
    token [1] when it is chosen, except in beam search. Raises `InputError` if there are more tokens than the
    model supports.
    """
    options = dict(settings)
    if options.get("do_sample"):
        options = {"num_beams": 1, "top_k": 0, **options}
    elif options.get("num_beams", 1) > 1:
        options["do_sample"] = False
    options.setdefault("max_new_tokens", reader.model.generation_config.max_new_tokens or NEW_TOKENS)
    seed = options.pop("seed", None)
    ids = prompt_ids(reader, prompt, options["max_new_tokens"])
    size, (before,) = ids.shape[1], ids.tolist()
    new_text = ContinuedText(reader.tokenizer.decode, before)
    if isinstance(show, TextStreamer):
        show.begin([before])

    def ended(sequences: Tensor, scores: Any, **_: Any) -> Tensor:
        texts = [new_text(row) for row in sequences[:, size:].tolist()]
        return torch.tensor([any(mark in text for mark in stop) for text in texts], device=sequences.device)

    pad = reader.model.generation_config.pad_token_id
    pad = reader.tokenizer.pad_id if pad is None else pad
    beams = options.get("num_beams") or reader.model.generation_config.num_beams or 1
    streamer = None if show is None or beams > 1 else Streamer(show)
    with torch.random.fork_rng(), mixed_in(reader.model, mixture):
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        sequences = reader.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0 if pad is None else pad,
            streamer=streamer,
            stopping_criteria=[ended] if stop else [],
            **options,
        )
    return sequences[0, size:].tolist()


def prompt_ids(reader: TransformersReader, prompt: str, new_tokens: int) -> Tensor:
    """Return the ids [1, T] of `prompt`, or the token that begins texts if it is empty.

    Raises `InputError` if `new_tokens` new tokens do not fit after it.
    """
    (ids,) = reader.encode([prompt])
    begin = reader.model.generation_config.bos_token_id
    if not ids and begin is None:
        raise InputError(
            "--prompt: expected a text; this model has no beginning-of-text token for an empty prompt"
        )
    ids = ids or [begin]
    if reader.longest is not None and len(ids) + new_tokens > reader.longest:
        raise InputError(
            f"--max-new-tokens: {len(ids)} prompt tokens and {new_tokens} new tokens exceed the limit of "
            f"{reader.longest} tokens of {reader.folder}"
        )
    return torch.tensor([ids], device=reader.model.device)
