"""Parts written as one expression on a command line: `linformer(k=256, max_length=4096)`."""

import ast
from typing import Any

from polyformer.core.errors import InputError


def with_options(text: str, where: str) -> dict[str, Any]:
    """`kind(name=value, ...)` as the mapping that a configuration reads; nothing is executed."""
    kind, bracket, _ = text.strip().partition("(")
    try:
        call = ast.parse(text.strip(), mode="eval").body if bracket else None
        keywords = call.keywords if isinstance(call, ast.Call) and not call.args else []
        options = {str(one.arg): ast.literal_eval(one.value) for one in keywords}
    except (SyntaxError, ValueError):
        raise InputError(f"{where}: expected 'kind(name=value, ...)', got {text.strip()!r}") from None
    return {"kind": kind.strip(), **options}
