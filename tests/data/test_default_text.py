"""The default text exists on every CPython and fails clearly where a distribution leaves it out."""

import sys
import types

import pytest

from polyformer.core.errors import InputError
from polyformer.data.sources.libraries import default_documents


def test_is_a_good_deal_of_english_prose_in_a_fixed_order():
    documents = default_documents()
    assert len(documents) > 50
    assert sum(map(len, documents)) > 300_000
    assert " the " in documents[0]
    assert documents == default_documents()


def test_is_sorted_by_name_and_leaves_out_what_is_empty(monkeypatch):
    module = types.ModuleType("pydoc_data.topics")
    module.topics = {"b": "second", "c": "\n", "a": "first"}
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
    assert default_documents() == ["first", "second"]


@pytest.mark.parametrize(
    "module", [None, types.ModuleType("pydoc_data.topics")], ids=["absent", "other layout"]
)
def test_says_the_way_out_where_python_has_no_help_texts(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", module)
    with pytest.raises(InputError, match=r"without its help texts.*--data PATH"):
        default_documents()
