"""Convert equations to MathML when the site is built, so that the browser needs no script."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator


def mathml(latex: str, display: str) -> str:
    """Return an equation as MathML.

    Raises `ExtensionError`, which stops the build, for invalid TeX and for unknown commands.
    """
    try:
        result = convert(latex, display=display)
    except Exception as error:
        raise ExtensionError(f"latex2mathml cannot read the equation {latex}", error) from error
    unread = re.findall(r">(\\[A-Za-z]+)<", result)
    if unread:
        raise ExtensionError(f"latex2mathml does not know {', '.join(unread)}: {latex}")
    return result


def inline(self: HTML5Translator, node: nodes.math) -> None:
    """Write an inline equation, $..$."""
    self.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def block(self: HTML5Translator, node: nodes.math_block) -> None:
    """Write a block equation, $$..$$; wide equations scroll."""
    self.body.append(f'<div class="equation" tabindex="0">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer under the name in conf.py."""
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
