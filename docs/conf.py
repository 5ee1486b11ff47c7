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
highlight_language = "text"  # blocks of Python say so
smartquotes = False  # quotes in docstrings are those of code

html_theme = "furo"
html_title = f"anyrank {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False

WIDE = 6  # columns of a table that gets small print
LONG = re.compile(r"\S{24,}")  # words that may break in any table
LONGISH = re.compile(r"\S{10,}")  # words that may break in wide ones
OPTION = re.compile(r"--[\w*-]+( \S+)?")
# within CamelCase, names, calls and dotted names
BREAKS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[_(=])(?=\w)|(?<=\.)(?=[a-z_])")


def narrow_tables(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Let long words in tables break, shorter ones in wide tables: both fit beside the contents."""
    for table in doctree.findall(nodes.table):
        is_wide = len(list(table.findall(nodes.colspec))) >= WIDE
        table["classes"] += ["wide"] * is_wide
        for text in list(table.findall(nodes.Text)):
            words = LONGISH if is_wide else LONG
            broken = words.sub(lambda word: BREAKS.sub("\u200b", word[0]), text)
            text.parent.replace(text, nodes.Text(broken))


def keep_options(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Keep an option of a command in one line: a browser breaks behind its hyphens."""
    for literal in doctree.findall(nodes.literal):
        if OPTION.fullmatch(literal.astext()):
            literal["classes"].append("option")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("doctree-resolved", narrow_tables)
    app.connect("doctree-resolved", keep_options)
