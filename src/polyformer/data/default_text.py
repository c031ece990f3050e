"""The default training text: chapters of Python's language reference, which is part of CPython."""

import importlib

from polyformer.core.errors import InputError


def default_documents() -> list[str]:
    """Return English prose, about 450 kB in some 80 documents, in the order of their names.

    Source: `pydoc_data.topics`, the text of Python's `help("...")`; it differs between versions of Python.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError) as error:
        raise InputError(
            "data: this Python comes without its help texts (pydoc_data), which are the default text: "
            "name a text of your own with --data PATH"
        ) from error
    return [text for _, text in sorted(topics.items()) if text.strip()]
