"""How the docs are built: `make docs`. Nothing is fetched, neither by the build nor by the built pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the gallery's tensors are small
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import holdfast  # noqa: E402 - after the thread count

project = "Holdfast"
author = "The Holdfast authors"
copyright = author
release = version = holdfast.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # the formulas' script and fonts, copied into the site
    "sphinxcontrib.bibtex",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
    "citations",
    "docstrings",
    "links",
    "registries",
]
exclude_patterns = ["_ext"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", r".*")]  # types of other packages have no page here

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
mathjax3_config = {"chtml": {"scale": 0.92}}
default_role = "literal"  # docstrings write `names` as Markdown does

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "alpha"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"show-inheritance": False}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_attr_annotations = False  # shapes would be taken for markup
python_maximum_signature_line_length = 88

sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "filename_pattern": r"plot_",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "min_reported_time": 0,
}

html_theme = "furo"
html_title = "Holdfast"
html_static_path = ["_static"]
html_css_files = ["holdfast.css"]
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
