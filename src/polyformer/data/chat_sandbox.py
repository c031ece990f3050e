"""The child process that renders chat templates: `python chat_sandbox.py SECONDS MEMORY CHARACTERS`.

A template comes with a checkpoint, so it is a stranger's program. Jinja's sandbox keeps it away from
attributes that lead out of the template, and this process bounds the rest:

    time        SECONDS of processor time for each rendering, by a timer of the kernel; its signal ends the
                process, so that nothing in a template, nor in a function of C, can outlast it
    memory      MEMORY bytes of addresses, as far as the system has such a limit
    output      CHARACTERS
    files       none can be opened after the imports, no socket either, again by a limit of the kernel

The parent (`data.chat`) also ends the process after a multiple of the time by the clock, which is the only
limit on Windows. A nested loop, a long product of a string and a recursion thus all end with an error.

Each request on standard input and each reply on standard output is a JSON object after its length in bytes,
8 of them, little-endian. The file does not import this library, so that it starts in a tenth of a second.

The environment equals transformers' (5.23, `utils/chat_template_utils.py`): blocks are trimmed, `break` and
`continue` exist, `tojson` escapes no HTML, `dict` and `namespace` take no names with an underscore first, and
`{% generation %}` marks the text of the assistant.
"""

import contextlib
import json
import pprint
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

try:
    import resource
except ImportError:  # Windows
    resource = None

LENGTH = 8
"""Bytes of the length before a message."""

IMPORTED = pprint, jinja2.constants, jinja2.debug
"""Modules that Jinja imports when a filter or an error needs them, when no file can be opened any more."""

COMPILED = 64
"""Templates that stay compiled."""


class GenerationSpans(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`: records where its text begins and ends.

    Positions are exact where the tag is outside of macros and of other blocks that collect their text first,
    as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 - as Jinja's extensions state theirs

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.pieces: list[str] = []
        self.spans: list[tuple[int, int]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the tag's contents as a call of `_marked`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        text = caller()
        start = sum(map(len, self.pieces))
        self.spans.append((start, start + len(text)))
        return text


class PlainNamespace(Namespace):
    """Jinja's namespace without attributes that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:
        self, *rest = args  # a template may name an attribute `self`
        values = dict(*rest, **attributes)
        for name in values:
            check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        check_attribute(name)
        super().__setitem__(name, value)


def check_attribute(name: object) -> None:
    """Raise `SecurityError` for the name of a namespace's attribute that may lead into Python."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name[:40]!r}")


class PlainDict:
    """The global `dict`: a call and `fromkeys`, and no class behind it."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """Return a dictionary of these keys."""
        return dict.fromkeys(*arguments)


def raise_exception(message: str) -> None:
    """End the rendering with a message of the template's author."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """Return the local time in a format of strftime."""
    return datetime.now().strftime(form)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON with `<`, `>` and `&` as they are."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of chat templates."""
    new = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationSpans, loopcontrols]
    )
    new.filters["tojson"] = tojson
    new.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return new


class Renderer:
    """Compiles templates and renders them, at most `characters` of text each."""

    def __init__(self, characters: int):
        self.characters = characters
        self.compiled: dict[str, jinja2.Template] = {}

    def __call__(self, source: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the text and its spans, or the error."""
        try:
            if source not in self.compiled:
                if len(self.compiled) == COMPILED:
                    self.compiled.clear()
                self.compiled[source] = environment().from_string(source)
            return self._rendered(self.compiled[source], variables)
        except MemoryError:
            return {"error": "it needs more memory than a template may have"}
        except RecursionError:
            return {"error": "its macros call each other without an end, or it is nested too deeply"}
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno}: {error.message}"}
        except Exception as error:  # a template can raise any
            return {"error": str(error) or type(error).__name__}

    def _rendered(self, template: jinja2.Template, variables: dict[str, Any]) -> dict[str, Any]:
        spans: Any = template.environment.extensions[GenerationSpans.identifier]
        spans.pieces, spans.spans, length = [], [], 0
        for piece in template.generate(variables):
            spans.pieces.append(piece)
            length += len(piece)
            if length > self.characters:
                return {"error": f"it writes more than {self.characters:,} characters"}
        return {"text": "".join(spans.pieces), "spans": spans.spans}


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """End this process if the block takes more processor time."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_process(memory: int) -> None:
    """Bound the memory of this process, and the files that it can open."""
    # What Python loads at first use: the zone of this machine, and the codec of escapes in strings.
    datetime.now().strftime("%c %Z")
    environment().from_string(r"{{ '\n' | tojson }}").render()
    if resource is None:
        return
    for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(OSError, ValueError):  # as on macOS, which has no limit of addresses
            resource.setrlimit(limit, (most, most))


def read_message(file: BinaryIO) -> Any:
    """Return the next message; None at the end of the file."""
    length = file.read(LENGTH)
    if len(length) < LENGTH:
        return None
    content = file.read(int.from_bytes(length, "little"))
    return json.loads(content)


def write_message(file: BinaryIO, message: object) -> None:
    """Write a message."""
    content = json.dumps(message).encode()
    file.write(len(content).to_bytes(LENGTH, "little") + content)
    file.flush()


def serve(render: Callable[[str, dict[str, Any]], dict[str, Any]], seconds: float) -> None:
    """Answer requests until standard input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (request := read_message(source)) is not None:
        with limited_time(seconds):
            reply = render(request["source"], request["variables"])
        write_message(sink, reply)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    limit_process(int(sys.argv[2]))
    serve(Renderer(int(sys.argv[3])), float(sys.argv[1]))
