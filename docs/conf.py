"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "hpcdask"
author = "The hpcdask developers"
copyright = f"2026, {author}"  # noqa: A001 (Sphinx's name)
version = release = installed_version("hpcdask")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"hpcdask {release}"
myst_heading_anchors = 3
autodoc_typehints = "description"
