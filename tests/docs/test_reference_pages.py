"""The reference names every command and option, the map every paper."""

from lineage import EDGES, NAMES
from reference_pages import command_page, package_page, recipe_page
from survey_page import drawing, page, papers

import polyformer.attention.patterns
from polyformer.cli.commands import COMMANDS
from polyformer.cli.documentation import members
from polyformer.training.recipes.recipe import recipe_names


def test_every_command_and_recipe_is_there():
    text = command_page()
    for name in COMMANDS:
        assert f"## polyformer {name}\n" in text
    assert "| `--max-new-tokens N` | largest number of tokens to generate" in text
    recipes = recipe_page()
    assert all(f"## {name}\n" in recipes for name in recipe_names())


def test_a_name_has_its_entry_in_a_single_place():
    seen: dict = {}
    first = package_page(polyformer.attention.patterns, ["Window", "Pattern"], seen)
    assert ".. autoclass:: polyformer.attention.patterns.Window\n" in first
    second = package_page(polyformer.attention.patterns, ["Window"], seen)
    assert "autoclass" not in second
    assert "`Window` ([polyformer.attention.patterns](attention.patterns.md))" in second


def test_every_paper_is_on_the_map_and_every_arrow_goes_forward():
    rows = papers()
    text = page()
    named = {(member.axis, member.name) for row in rows for member in row.members}
    assert named == {(m.axis, m.name) for m in members() if any(c.isdigit() for c in m.cls.paper)}
    assert drawing(rows).count("<rect x=") == len(rows) + 8, "a box each, and eight lanes"
    assert "Performer" in text
    year = {row.key: row.year for row in rows}
    assert not [edge for edge in EDGES if not set(edge) <= year.keys()], "an arrow from or to no paper"
    assert not [(a, b) for a, b in EDGES if year[a] > year[b]]
    assert not [key for key in NAMES if key not in year], "a name of no paper"
