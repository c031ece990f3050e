"""Scripts in cells as pages."""

from tutorials import cells, fingerprint

SCRIPT = """# %% [markdown]
# # Title
#
# Prose with $x$.

# %%
x = 1  # a comment


# %% [markdown]
# More.
"""


def test_cells_are_prose_and_code():
    assert [(cell.prose, cell.text) for cell in cells(SCRIPT)] == [
        (True, "# Title\n\nProse with $x$."),
        (False, "x = 1  # a comment"),
        (True, "More."),
    ]
    assert cells(SCRIPT)[1].line == 7


def test_prose_may_change_and_code_may_not():
    assert fingerprint(SCRIPT) == fingerprint(SCRIPT.replace("More", "Less"))
    assert fingerprint(SCRIPT) != fingerprint(SCRIPT.replace("1", "2"))
