"""Sphinx configuration. `make docs` builds with warnings as errors, and without a network."""

from __future__ import annotations

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
autodoc_typehints = "description"
python_maximum_signature_line_length = 88
default_role = "code"  # docstrings put names between single backticks

html_theme = "furo"
html_title = f"anyrank {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
