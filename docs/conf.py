"""The site: Markdown by MyST, references by autodoc, pictures by the pages' own blocks."""

import shutil
import sys
from pathlib import Path

import torch
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import metaaugment  # noqa: E402

import pages  # noqa: E402

project = "metaaugment"
author = "The authors of metaaugment"
release = metaaugment.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist", "dollarmath"]
myst_heading_anchors = 3
default_role = "code"  # docstrings say `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # what they are is said in words; shapes are in the source
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"metaaugment {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]


def draw(app: Sphinx) -> None:
    """Run the pages that show pictures; each is made by the block that stands above it."""
    torch.set_num_threads(1)
    for page in sorted(DOCS.glob("*.md")):
        if pages.pictures(page):
            folder = DOCS / "_build" / "pages" / page.stem
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            pages.run(page, folder)


def set_formula(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """As MathML, which browsers know: nothing is loaded from elsewhere, and a mistake stops the build."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def show_code(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """An indented passage of a docstring, behind an empty line, is code."""
    for place in range(len(lines) - 1, 1, -1):
        begins = lines[place].startswith("    ") and not lines[place - 1]
        if begins and not lines[place - 2].startswith("    "):
            lines[place:place] = ["::", ""]


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (set_formula, None), (set_formula, None))
    app.connect("builder-inited", draw)
    app.connect("autodoc-process-docstring", show_code, priority=400)  # ahead of napoleon
