"""Write ``hpcdask/__init__.pyi``, by which editors and type checkers know the public names.

The cluster classes are made when they are asked for, and the keywords of all come from tables, so
their signatures exist at run time only. ``python tools/stub.py`` writes them down, and a
test tells when they have changed since.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import hpcdask
from hpcdask.spec.signatures import type_text

STUB = Path(hpcdask.__file__).with_name("__init__.pyi")
HEAD = """\
# Made by tools/stub.py from what there is at run time: change that, and run it again.
# ruff: noqa: I001
# fmt: off
"""
IMPORTS = """\
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from distributed import Client

from hpcdask.clusters.cluster import JobCluster
from hpcdask.clusters.detached.attached import AttachedCluster
from hpcdask.runner.runner import Runner as _Runner
"""


def parameter(one: inspect.Parameter) -> str:
    """A parameter without its blanks, at which lines are broken."""
    plain = isinstance(one.default, bool | int | float | str | None)
    default = repr(one.default) if plain else "..."
    given = "" if one.default is one.empty else f" = {default}"
    star = "*" if one.kind is one.VAR_POSITIONAL else ""
    return f"{star}{one.name}: {type_text(one.annotation)}{given}"


def function(name: str, signature: inspect.Signature, first: tuple[str, ...] = ()) -> str:
    """A function's line, broken where it is too long."""
    indent = "    " if first else ""
    words = list(first)
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(parameter(one))
    # a parameter stays in one piece
    text = ", ".join(word.replace(" ", "\0") for word in words)
    inner = textwrap.indent(
        "\n".join(textwrap.wrap(text, 92, break_long_words=False, break_on_hyphens=False)),
        f"{indent}    ",
    ).replace("\0", " ")
    result = type_text(signature.return_annotation)
    return f"{indent}def {name}(\n{inner},\n{indent}) -> {result}: ..."


def entry(name: str) -> str:
    """What the stub says of a public name."""
    found: Any = getattr(hpcdask, name)
    signature = inspect.signature(found)
    if not inspect.isclass(found):
        return function(name, signature)
    base = "_Runner" if name == "Runner" else "JobCluster"
    summary = re.split(r"\n *\n", inspect.getdoc(found) or "")[0]
    init = function("__init__", signature, ("self",))
    return f'class {name}({base}):\n    """{" ".join(summary.split())}"""\n\n{init}'


def stub() -> str:
    """The whole file."""
    body = "\n\n".join(entry(name) for name in sorted(hpcdask.__all__))
    annotations = re.sub(r"""(\"{3}|').*?\1""", "", body)
    modules = set(re.findall(r"\b([a-z_][\w.]*)\.\w+", annotations))
    imports = "\n".join(f"import {module}" for module in sorted(modules))
    names = "\n".join(f'    "{name}",' for name in sorted(hpcdask.__all__))
    return f"{HEAD}{imports}\n{IMPORTS}\n__version__: str\n__all__ = [\n{names}\n]\n\n{body}\n"


if __name__ == "__main__":
    STUB.write_text(stub())
