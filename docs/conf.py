"""Sphinx's settings: `make docs` builds these pages, with warnings as errors and no network."""

import sys
from pathlib import Path

# The sources beside these pages, whatever version of the packages is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tvd_core import __version__

project = "TVD loss"
author = "the TVD loss authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False

# Headings are link targets, as on a page that shows the Markdown itself.
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False

# A reference that leads nowhere is a warning, but for the frameworks' own names: to look those up
# would need a network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|jax|numpy|collections)(\..*)?"), ("py:.*", "optional")]
