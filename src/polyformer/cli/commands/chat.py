"""Talk with a chat model in the terminal: replies appear token by token.

Each line is a message; the model sees the whole conversation, by the chat template of its checkpoint. Its
cache stays between the turns, so that only new tokens are computed. Lines that begin with "/" are commands:

  /system TEXT   set the system message, the model's instructions; without TEXT remove it
  /reset         begin again; the system message stays
  /save FILE     write the messages as lines of JSON
  /quit          end, as Ctrl-D does; Ctrl-C ends only a reply

The defaults of sampling and of end tokens are in the checkpoint's generation_config.json. If
standard input is no terminal, its lines are the messages, only replies are printed, and the first error ends
the program.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import Device, argument, device, option, set_options
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import COUNT, NEW_TOKENS

if TYPE_CHECKING:
    from polyformer.applications.chat import Conversation

EXAMPLES = """examples:
  polyformer chat smollm2.gguf
  polyformer chat smollm2-dir --system "Answer in one sentence." --temperature 0.7 --top-p 0.9
  polyformer chat smollm2.gguf --memory "sinks(length=508)"
  polyformer chat smollm2.gguf --cache int8 --max-new-tokens 100
  printf 'What is the capital of France?\\nAnd of Italy?\\n' | polyformer chat smollm2.gguf
"""

SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens"),
    *("no_repeat_ngram_size", "repetition_penalty", "cache"),
)
"""Options with the names of generation settings."""

PROMPT = "> "


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of `polyformer chat`."""

    model: str = argument(
        "folder of a run or of a checkpoint with its tokenizer and chat template, or a GGUF file",
        metavar="MODEL",
    )
    system: str | None = option("the system message: the model's instructions (default: as in the template)")
    max_new_tokens: int | None = option(
        "largest number of tokens of a reply (default: as in the checkpoint, else 512)", most=NEW_TOKENS
    )
    temperature: float | None = option("sample from softmax(logits / X), X > 0 (default: 1 for sampling)")
    top_k: int | None = option("sample among the N most probable tokens (default: all)")
    top_p: float | None = option(
        "nucleus sampling: sample from the smallest set of tokens with total probability X or "
        "more (default: 1)"
    )
    min_p: float | None = option("sample among tokens with at least the share X of the highest probability")
    seed: int | None = option(
        "random seed of sampling, the same for each reply (default: random)", most=COUNT
    )
    no_repeat_ngram_size: int | None = option("do not repeat n-grams of N tokens (default: 0, no limit)")
    repetition_penalty: float | None = option(
        "values above 1 make tokens that already occur less probable (default: 1, no penalty)"
    )
    stop: str | None = option("end a reply before this text", metavar="TEXT")
    memory: str | None = option(
        "bounded cache of the first and the latest tokens, for conversations without an end, such as "
        "'sinks(length=508)' (default: the whole conversation)"
    )
    cache: str | None = option(
        "policy of the KV cache, such as 'snapkv(budget=1024)', which drops keys of the first message, or "
        "'int8' (default: all keys, as computed)",
        metavar="POLICY",
    )
    device: Device = device()


def run(options: ChatOptions) -> None:
    """Read messages and commands, and print replies, until /quit or the end of standard input."""
    from polyformer.core.ops.cpu import model_threads

    conversation = open_conversation(options)
    terminal = sys.stdin.isatty()
    model: Any = conversation.text.model
    with model_threads(model):
        for line in messages_of(sys.stdin, terminal):
            try:
                if line.startswith("/"):
                    if not run_line_command(conversation, line):
                        return
                else:
                    conversation.reply(line, print_piece)
                    print_piece("\n")
            except InputError as error:
                if not terminal:
                    raise
                print(f"polyformer: error: {error}", file=sys.stderr)


def open_conversation(options: ChatOptions) -> "Conversation":
    """Return a conversation with the model, its memory and its settings."""
    from polyformer.applications.loaded import load_for
    from polyformer.applications.loaded.writers import plain_settings, with_sampling
    from polyformer.models.checkpoints.convert import with_parts

    settings: dict[str, Any] = with_sampling(set_options(options, SETTINGS))
    plain_settings(settings)  # raises errors before the weights are read
    loaded = load_for(options.model, "generate", options.device)
    if options.memory is not None:
        loaded.model = with_parts(loaded.model, memory=options.memory)
    return loaded.conversation(options.system, stop=options.stop, **settings)


def messages_of(source: Any, terminal: bool) -> Iterator[str]:
    """Yield the lines of a terminal after a prompt, or of another input, without empty lines."""
    if not terminal:
        yield from (line.rstrip("\n") for line in source if line.strip())
        return
    import contextlib

    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401 - lets `input` edit lines
    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print()
            return
        if line.strip():
            yield line


def print_piece(piece: str) -> None:
    """Print a piece of a reply at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def run_line_command(conversation: "Conversation", line: str) -> bool:
    """Run a line such as "/reset"; return whether the conversation continues.

    Raises `InputError` for an unknown command, and for a file that cannot be written.
    """
    name, _, text = line.strip().partition(" ")
    text = text.strip()
    if name == "/quit":
        return False
    if name not in LINE_COMMANDS:
        known = ", ".join((*LINE_COMMANDS, "/quit"))
        raise InputError(f"{quote(name)}: unknown command; expected {known}, or a message without a slash")
    LINE_COMMANDS[name](conversation, text)
    return True


def _save(conversation: "Conversation", file: str) -> None:
    if not file:
        raise InputError("/save: expected the name of a file after it")
    conversation.save(file)
    print(f"{len(conversation.messages)} messages in {file}", file=sys.stderr)


LINE_COMMANDS: "dict[str, Callable[[Conversation, str], None]]" = {
    "/system": lambda conversation, text: conversation.set_system(text or None),
    "/reset": lambda conversation, text: conversation.reset(),
    "/save": _save,
}
"""What a line that begins with a slash does."""
