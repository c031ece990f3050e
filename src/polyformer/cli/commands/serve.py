"""Serve a model over HTTP, as OpenAI's API: chats, completions and embeddings.

Clients of OpenAI's API, such as its Python package, use the address with base_url http://HOST:PORT/v1. A
language model has /v1/completions and, with a chat template, /v1/chat/completions; an encoder has
/v1/embeddings. Requests of all clients are generated together in one batch that texts join and leave.

By default only programs of this machine reach the server. For others set --host, and --api-key or the
variable POLYFORMER_API_KEY; put a proxy with HTTPS before it. SIGTERM and Ctrl-C end it after the replies
that have begun; a second signal ends it at once.
"""

import functools
import ipaddress
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval

from polyformer.cli.commands.options import Device, argument, device, option, refuse
from polyformer.core.errors import InputError, quote
from polyformer.core.imports import needs_extra
from polyformer.core.ranges import NonNegativeInt, PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.serving.app import ModelServer
    from polyformer.applications.serving.engine import Engine, Limits
    from polyformer.attention.patterns import Pattern

EXAMPLES = """examples:
  polyformer serve smollm2.gguf
  polyformer serve smollm2-dir --port 8080 --max-batch 32 --max-tokens 2048
  polyformer serve runs/demo-1 --host 0.0.0.0 --api-key "$KEY"
  polyformer serve smollm2.gguf --cache int8
  polyformer serve smollm2.gguf --draft lookup
  polyformer serve smollm2.gguf --attention "Window(512) | Global(4)" --memory "sinks(length=508)"
  polyformer serve minilm-dir
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}'
"""

GENERATING = "attention", "memory", "cache", "draft", "draft_tokens", "lookup_ngram"
"""Options of models that generate."""

KEY = "POLYFORMER_API_KEY"
"""The variable with the key; other users of a machine can read the command line."""

TOKENS = 4096
"""The limit of tokens for models that do not state theirs, or a larger."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of `polyformer serve`."""

    model: str = argument(
        "folder of a run or of a checkpoint with its tokenizer, or a GGUF file", metavar="MODEL"
    )
    host: str = option("address to listen on (default: 127.0.0.1, this machine)", "127.0.0.1")
    port: Annotated[int, Interval(ge=0, le=65535)] = option("port (default: 8000; 0: a free one)", 8000)
    api_key: str | None = option("key that clients must send (default: POLYFORMER_API_KEY, else none)")
    name: str | None = option("the model's name for clients (default: that of its folder or file)")
    max_batch: PositiveInt = option("texts that are generated at once (default: 16)", 16)
    max_queue: PositiveInt = option("texts that may wait; others get status 503 (default: 128)", 128)
    max_tokens: PositiveInt | None = option(
        "tokens of a prompt and its new tokens together (default: the model's length, at most 4096)"
    )
    max_seconds: Annotated[float, Gt(0)] = option(
        "time of a request; its text ends then (default: 600)", 600.0
    )
    keep_tokens: NonNegativeInt | None = option(
        "tokens of earlier texts whose cache is kept for prompts that begin alike (default: as --max-tokens)"
    )
    max_bytes: PositiveInt = option("bytes of a request (default: 4194304)", 2**22, most=2**30)
    attention: str | None = option(
        "pattern of a language model's attention, such as 'Window(512) | Global(4)' (default: the model's)",
        metavar="PATTERN",
    )
    memory: str | None = option(
        "bounded cache of the first and the latest tokens of each text, such as 'sinks(length=508)' "
        "(default: the whole text)"
    )
    cache: str | None = option(
        "policy of the KV cache, such as 'snapkv(budget=1024)', which drops keys of long prompts, or 'int8' "
        "(default: all keys, as computed)",
        metavar="POLICY",
    )
    draft: str | None = option(
        "proposes tokens for a single text in the batch: 'lookup', or a model with the same tokenizer",
        metavar="DRAFT",
    )
    draft_tokens: PositiveInt | None = option(
        "with --draft: maximum number of tokens to propose (default: 5, lookup: 10)"
    )
    lookup_ngram: Annotated[int, Ge(2)] | None = option(
        "with --draft lookup: largest n-gram to find in the preceding text (default: 3)"
    )
    pooling: Literal["mean", "first", "last", "max"] | None = option(
        "of an encoder's vectors, if its folder does not say it"
    )
    device: Device = device()


def run(options: ServeOptions) -> None:
    """Load the model and serve it until a signal."""
    with needs_extra("serve", "serve: needs FastAPI, uvicorn and prometheus_client"):
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn

        from polyformer.applications.serving.app import create_app
    key = options.api_key or os.environ.get(KEY) or None
    warn_of_open_address(options.host, key)
    server = open_server(options, key)
    config = uvicorn.Config(
        create_app(server),
        host=options.host,
        port=options.port,
        log_level="warning",
        # uvicorn's configuration closes the handlers of other libraries, and their standard error with them.
        log_config=None,
        timeout_graceful_shutdown=int(options.max_seconds) + 10,
    )
    listener = bound(options)
    print(f"serving {server.name} at http://{options.host}:{listener.getsockname()[1]}/v1", flush=True)
    # uvicorn raises the signal again that ended it; an ordinary end is no failure.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    uvicorn.Server(config).run([listener])


def open_server(options: ServeOptions, key: str | None) -> "ModelServer":
    """Load the model and return its server.

    Raises `InputError` for a model that serves nothing, and for options that it cannot have.
    """
    from polyformer.applications.loaded import load
    from polyformer.applications.serving.app import ModelServer
    from polyformer.models.checkpoints.convert import with_parts
    from polyformer.nn.cache import CachePolicy

    loaded = load(options.model, options.device)
    if "generate" not in loaded.can and "embed" not in loaded.can:
        raise InputError(
            f"{options.model}: expected a language model or an encoder of texts; this model can "
            f"{', '.join(loaded.can)}"
        )
    if "generate" not in loaded.can:
        refuse(options, GENERATING, f"not available for {options.model}, which has vectors; leave it out")
    loaded.model = with_parts(loaded.model, attention_of(options), options.memory)
    cache = None if options.cache is None else CachePolicy.from_dict(options.cache, "--cache")
    path = Path(options.model)
    name = options.name or (path.stem if path.is_file() else path.resolve().name)
    limits, engine = limits_of(options, loaded.model), engine_of(options, loaded)
    server = ModelServer(loaded, name, limits, key, options.pooling, cache, engine=engine)
    if server.engine is None:
        loaded.embed("", options.pooling)  # raises an error for a model without a pooling
    elif not server.engine.joins:
        print(
            "texts of this model cannot join a batch: each begins when the last batch has ended",
            file=sys.stderr,
        )
    return server


def engine_of(options: ServeOptions, loaded: Any) -> "Callable[..., Engine]":
    """Return the kind of engine: with drafts by --draft; raise `InputError` for another tokenizer."""
    from polyformer.applications.loaded import load
    from polyformer.applications.serving.drafting import Drafting, DraftingEngine
    from polyformer.applications.serving.engine import Engine
    from polyformer.models.generation.config import SpeculationConfig

    if options.draft is None:
        refuse(options, ("draft_tokens", "lookup_ngram"), "requires --draft")
        return Engine
    draft: Any = "lookup"
    if options.draft != "lookup":
        refuse(options, ("lookup_ngram",), "requires --draft lookup")
        other = load(options.draft, options.device)
        if "generate" not in other.can or vocabulary(other) != vocabulary(loaded):
            raise InputError(
                f"--draft: expected a language model with the tokenizer of {options.model}, or 'lookup', got "
                f"{options.draft}"
            )
        draft = other.model
    numbers = {"draft_tokens": options.draft_tokens, "lookup_ngram": options.lookup_ngram}
    chosen = {name: value for name, value in numbers.items() if value is not None}
    drafting = Drafting(draft=draft, speculation=SpeculationConfig(**chosen))
    return functools.partial(DraftingEngine, drafting=drafting)


def vocabulary(loaded: Any) -> dict[str, int]:
    """Return the tokens of a loaded language model with their ids."""
    return loaded.task.tokenizer.backend.get_vocab()


def attention_of(options: ServeOptions) -> "Pattern | None":
    """Return the pattern of --attention; raise `InputError` for a mechanism, which has weights to learn."""
    from polyformer.attention.patterns import Pattern
    from polyformer.models.checkpoints.convert import read_attention

    attention = read_attention(options.attention)
    if attention is not None and not isinstance(attention, Pattern):
        raise InputError(
            "--attention: expected a pattern, such as 'Window(512) | Global(4)', got the mechanism "
            f"{quote(options.attention)}; convert the model first: polyformer convert MODEL OUT --attention "
            "MECHANISM --transfer TEXT"
        )
    return attention


def limits_of(options: ServeOptions, model: Any) -> "Limits":
    """Return the limits of a server."""
    from polyformer.applications.serving.engine import Limits
    from polyformer.models.config import longest_text, max_positions

    tokens = options.max_tokens or min(longest_text(model.config) or TOKENS, TOKENS)
    learned = max_positions(model.config)
    if learned is not None and tokens > learned:
        raise InputError(f"--max-tokens: the model has positions for {learned} tokens, got {tokens}")
    return Limits(
        batch=options.max_batch,
        queue=options.max_queue,
        tokens=tokens,
        seconds=options.max_seconds,
        body=options.max_bytes,
        kept=options.keep_tokens,
    )


def bound(options: ServeOptions) -> Any:
    """Return the socket of a server; raise `InputError` for an address that is not free or not there."""
    import socket

    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        place = f"{options.host}:{options.port}"
        raise InputError(f"--host, --port: {place}: {error.strerror or error}; choose another") from error
    return listener


def warn_of_open_address(host: str, key: str | None) -> None:
    """Warn if other machines can use the server without a key."""
    from polyformer.core.errors import caution

    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local and key is None:
        caution(f"--host {host}: other machines can use this server without a key; set --api-key")
