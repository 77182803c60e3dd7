"""Formulas as MathML, made when the pages are built. Browsers show it by themselves: no script, no network."""

from __future__ import annotations

import math_core
from docutils import nodes
from sphinx.util import logging

_CONVERTER = math_core.LatexToMathML(fancy_error=False)


def write_formula(translator, node):
    """Write one formula. One that cannot be translated is a warning, which ends ``make docs``."""
    displayed = isinstance(node, nodes.math_block)
    try:
        formula = _CONVERTER.convert_with_local_state(node.astext().strip(), displaystyle=displayed)
    except math_core.LatexError as error:
        logging.getLogger(__name__).warning("no MathML for %s: %s", node.astext(), error, location=node)
    else:
        translator.body.append(f'<div class="formula">{formula}</div>\n' if displayed else formula)
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", inline_renderers=(write_formula, None), block_renderers=(write_formula, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
