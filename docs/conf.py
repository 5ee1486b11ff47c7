"""Sphinx configuration. `make docs` builds with warnings as errors, and without a network."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

import anyrank

project = "anyrank"
author = "the anyrank authors"
copyright = author
release = version = anyrank.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

# Links to headings work across pages: [text](formats.md#safetensors).
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "description"
python_maximum_signature_line_length = 88
default_role = "code"  # docstrings put names between single backticks

html_theme = "furo"
html_title = f"anyrank {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

WIDE = 6  # columns of a table that gets small print
LONG = re.compile(r"\S{24,}")  # words that may break in any table
# within CamelCase, names, calls and dotted names
BREAKS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[_(=])(?=\w)|(?<=\.)(?=[a-z_])")


def narrow_tables(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let long words in tables break, and all in wide ones: they fit beside the navigation."""
    for table in doctree.findall(nodes.table):
        is_wide = len(list(table.findall(nodes.colspec))) >= WIDE
        table["classes"] += ["wide"] * is_wide
        for text in list(table.findall(nodes.Text)):
            broken = BREAKS.sub if is_wide else _in_long_words
            text.parent.replace(text, nodes.Text(broken("\u200b", text)))


def _in_long_words(mark: str, text: str) -> str:
    return LONG.sub(lambda word: BREAKS.sub(mark, word[0]), text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-resolved", narrow_tables)
