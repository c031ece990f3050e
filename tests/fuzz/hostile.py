"""How inputs are made hostile, and what may come of them: success, or an `InputError` of few words."""

import copy
import json
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st

from polyformer.core.errors import MESSAGE, InputError

SECONDS = 10.0
"""Of processor time for one case."""

DAY = 100
"""Examples of hypothesis' own profile, the day's; the profiles `night` and `fuzz` have more."""

FUZZING = settings.default is not None and settings.default.max_examples > DAY
"""Whether this is `make fuzz`, of the night or long."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**15, 2**24, 2**31, 2**40, 2**63, -(2**70), 10**400),
    *(0.0, 0.5, -0.5, 1.0, 1.5, 1e-30, 1e30, 1e300, -1e300),
    *("", "x", "1e3", "1", "nan", "gelu", "../../x", "/etc/passwd", "a" * 300, "a" * 20000, "\0", "\u202e"),
    *([], [1], [[]], ["gelu"], [None], [0] * 50, [-1, 1], ["a", "b"], [[["global", "local"], 10**9]]),
    *({}, {"a": 1}, {"kind": "lsh"}, {"kind": []}, {"0": "x"}, {"x": {"y": {}}}, {"": None}),
)
"""What a file may say in the place of anything."""

WORDS = (
    *("[" * 300, "{" * 100, '{"a": [' * 50, "NaN", "1e999", "-" * 400, '"\\ud800"', "9" * 5000, "|" * 50),
    *("&a [*a]", "*a", "&a ", "<<: ", "!!python/name:os.system ", "\x00", "\ufeff", '"a": 1, "a": 1', "("),
    *("null", "[]", "{}", "0x10", "1_0", "\t", "\n", "\r", "\u2028", "'", '"', "\\", "/", ":", "=", "10**9"),
)


def cases(quick: int, thorough: int | None = None) -> settings:
    """So many cases in the suite, the same ones every time; by `make fuzz` many, and others each time."""
    return settings(
        max_examples=(thorough or settings.default.max_examples) if FUZZING else quick,
        derandomize=not FUZZING,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def survives(run: Callable[[], object]) -> InputError | None:
    """Runs one case; anything but success and a short `InputError`, in time, is raised."""
    refused = None
    with _limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            run()
        except InputError as error:
            refused = error
    assert refused is None or len(str(refused)) <= MESSAGE
    event("read" if refused is None else "refused")
    return refused


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s of processor time")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@st.composite
def changed_data(draw: st.DrawFn, data: Any, most: int = 3) -> Any:
    """JSON-like `data` with values replaced, removed, doubled, moved or added anywhere in it."""
    changed = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, most))):
        changed = _change(draw, changed)
    return changed


def _change(draw: st.DrawFn, data: Any) -> Any:
    hostile = st.sampled_from(VALUES).map(copy.deepcopy)
    if not isinstance(data, dict | list) or not data or draw(st.integers(0, 40)) == 0:
        return draw(hostile)
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    key = draw(st.sampled_from(keys))
    action = draw(
        st.sampled_from(["replace", "replace", "inside", "inside", "remove", "swap", "add", "nudge"])
    )
    if action == "inside":
        data[key] = _change(draw, data[key])
    elif action == "remove":
        del data[key]
    elif action == "swap":
        other = draw(st.sampled_from(keys))
        data[key], data[other] = data[other], data[key]
    elif action == "add" and isinstance(data, dict):
        data[draw(st.sampled_from(["kind", "seed", "x", "", "_name", "a" * 300]))] = draw(hostile)
    elif action == "nudge" and isinstance(data[key], int):
        data[key] += draw(st.integers(-3, 3))
    else:
        data[key] = draw(hostile)
    return data


@st.composite
def changed_text(draw: st.DrawFn, text: str, most: int = 3) -> str:
    """`text` cut, doubled, with hostile words in it, or with characters changed."""
    for _ in range(draw(st.integers(1, most))):
        at = draw(st.integers(0, len(text)))
        until = min(len(text), at + draw(st.integers(0, 30)))
        action = draw(st.sampled_from(["word", "word", "cut", "remove", "double", "character", "many"]))
        if action == "word":
            text = text[:at] + draw(st.sampled_from(WORDS)) + text[until if draw(st.booleans()) else at :]
        elif action == "cut":
            text = text[:at]
        elif action == "remove":
            text = text[:at] + text[until:]
        elif action == "double":
            text = text[:until] + text[at:]
        elif action == "many":
            text = text[:at] + text[at:until] * draw(st.integers(2, 200)) + text[until:]
        else:
            text = text[:at] + draw(st.characters()) + text[at + 1 :]
    return text


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes, head: int) -> bytes:
    """`content` cut, or with bytes changed, mostly among the first `head`."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(head, max(len(changed) - 1, 0))))
        action = draw(st.sampled_from(["set", "set", "cut", "insert", "remove"]))
        if action == "set" and changed:
            changed[at] = draw(
                st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, ord("9"), ord("-"), ord("["), ord('"')])
            )
        elif action == "cut":
            del changed[at:]
        elif action == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            del changed[at : at + draw(st.integers(1, 9))]
    return bytes(changed)


def changed_json(text: str) -> st.SearchStrategy[bytes]:
    """The text of a JSON file, changed as text or as data."""
    changed = changed_text(text) | changed_data(json.loads(text)).map(json.dumps)
    return changed.map(lambda text: text.encode("utf-8", "surrogatepass"))
