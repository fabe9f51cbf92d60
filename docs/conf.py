"""Sphinx configuration."""

import inspect
import re
import sys
import tomllib
from importlib.metadata import version as installed_version
from pathlib import Path

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parent))  # for commands.py and rooms.py

from rooms import Rooms

import hpcdask

project = "hpcdask"
author = "The hpcdask developers"
copyright = f"2026, {author}"  # noqa: A001 (Sphinx's name)
version = release = installed_version("hpcdask")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_click",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
# Links to edit a page and to report a problem, once the repository has an address
project_file = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
if source := project_file["project"]["urls"].get("Source"):
    html_theme_options = {
        "source_repository": source,
        "source_branch": "main",
        "source_directory": "docs/",
        "footer_icons": [
            {"name": "Report a problem", "url": f"{source}/issues", "html": "issues", "class": ""}
        ],
    }
html_title = f"hpcdask {release}"
html_static_path = ["pictures"]
html_css_files = ["site.css"]
myst_heading_anchors = 3
autosummary_generate = False  # tables of names only, no pages of their own
# what docstrings put in single backquotes is a name of this package, linked where it is documented
default_role = "py:obj"
add_module_names = False
smartquotes = False  # -- is an option
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings tell types in words
napoleon_google_docstring = False
napoleon_use_rtype = False


def setup(app):
    app.add_directive("rooms", Rooms)
    app.connect("doctree-resolved", lambda app, tree, page: set_dashes(tree))
    app.connect("autodoc-process-docstring", leave_out_same, priority=400)  # before napoleon


PARAMETER = re.compile(r"^(\w+) : .*\n(?:    .*\n)*", re.M)


def leave_out_same(app, what, name, found, options, lines):
    """Say of a cluster class only in what its keywords differ from those of the first."""
    if not getattr(found, "queue_name", None) or found is hpcdask.SLURMCUDACluster:
        return
    first = list(PARAMETER.finditer(inspect.getdoc(hpcdask.SLURMCUDACluster) + "\n"))
    text = "\n".join([*lines, ""])
    there = {one[1] for one in PARAMETER.finditer(text)}
    missing = [f"``{one[1]}``" for one in first if one[1] not in there]
    for one in first:
        text = text.replace(one[0], "")
    told = f"The keywords are those of `SLURMCUDACluster` but {', '.join(missing)}, and these:\n\n"
    lines[:] = text.replace("Parameters\n", f"{told}Parameters\n", 1).splitlines()


def set_dashes(tree):
    """Set the dash between a parameter and its text, which smart quotes would do."""
    for text in list(tree.findall(nodes.Text)):
        if text.startswith(" -- "):
            text.parent.replace(text, nodes.Text(" \N{EN DASH} " + text[4:]))
