"""Sphinx configuration; `docs/site/build.py` writes the sources and calls Sphinx."""

import contextlib
import inspect
import os
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import rst
from pygments.lexers import JsonLexer, TextLexer

import polyformer

project = "polyformer"
author = "The polyformer developers"
copyright = "The polyformer developers, Apache-2.0"
version = release = polyformer.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "mathml"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
default_role = "code"
language = "en"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_dmath_double_inline = True
myst_heading_anchors = 4
math_numfig = False
html_math_renderer = "mathml"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"polyformer {version}"
html_static_path = [str(Path(__file__).parent / "_static")]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#17496f",
        "color-brand-content": "#1f5a8c",
        "font-stack": "system-ui, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif",
    },
    "dark_css_variables": {"color-brand-primary": "#8fc1e8", "color-brand-content": "#7fb6e2"},
    "navigation_with_keys": True,
}
# On a server of GitHub the pages link to their sources, to read and to edit them.
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")
if REPOSITORY:
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    html_theme_options |= {
        "source_repository": f"{server}/{REPOSITORY}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_selector = "div:not(.printed) > div.highlight > pre"


def docstring_to_rst(app, what, name, obj, options, lines):
    """Convert docstrings, which are prose with indented equations, to reStructuredText."""
    lines[:] = rst("\n".join(lines)).splitlines()


def without_ranges(app, obj, bound_method):
    """Remove the ranges from the types of a signature; the tables of options word them."""
    function = inspect.unwrap(getattr(obj, "__func__", obj))
    if inspect.isfunction(function):
        with contextlib.suppress(NameError):  # names that only type checkers import stay as text
            function.__annotations__ |= typing.get_type_hints(function)


def without_sources_that_do_not_exist(app, pagename, templatename, context, doctree):
    """Leave out the links to the source of a page that is generated."""
    if not (Path(__file__).parents[1] / f"{pagename}.md").is_file():
        context["theme_source_repository"] = ""


def setup(app):
    """Register the docstring converter, and lexers for code languages that Pygments does not know."""
    app.add_lexer("jsonl", JsonLexer)
    for language in ("csv", "tsv"):
        app.add_lexer(language, TextLexer)
    app.connect("html-page-context", without_sources_that_do_not_exist)
    app.connect("autodoc-process-docstring", docstring_to_rst)
    app.connect("autodoc-before-process-signature", without_ranges)
