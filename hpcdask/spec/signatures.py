"""Signatures and docstrings that name what a function takes as ``**keywords``."""

from __future__ import annotations

import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Union


class Keyword(NamedTuple):
    """Keyword: its type, a text on it, and what stands for a value that nobody gave."""

    name: str
    type: Any
    text: str
    default: Any = None


def spell_out(function: Callable[..., Any], keywords: Iterable[Keyword]) -> inspect.Signature:
    """Return a function's signature with keywords in the place of ``**keywords``.

    Keywords that the function names itself are left out.
    """
    signature = inspect.signature(function, eval_str=True)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    spelled = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type
        )
        for one in keywords
        if one.name not in signature.parameters
    ]
    return signature.replace(parameters=[*own, *spelled])


def describe(doc: str | None, keywords: Iterable[Keyword]) -> str:
    """Return a docstring with keywords in the place of ``**keywords`` and its text."""
    told = "".join(
        f"{one.name} : {_in_words(one.type)}\n"
        f"{textwrap.indent(textwrap.fill(one.text, 88), '    ')}\n"
        for one in keywords
    )
    plain = inspect.cleandoc(doc or "") + "\n"  # Python 3.13 has taken the indent away already
    text = re.sub(r"^\*\*\w+\n(?:    .*\n)*", lambda _: told, plain, flags=re.M)
    return textwrap.indent(text, "    ").strip()


def type_text(annotation: Any) -> str:
    """Return an annotation as it is written, the same in every Python."""
    if isinstance(annotation, str):
        return annotation
    if annotation is types.NoneType:
        return "None"
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(type_text, typing.get_args(annotation)))
    if typing.get_origin(annotation) is Literal:
        return f"Literal[{', '.join(map(repr, typing.get_args(annotation)))}]"
    return inspect.formatannotation(annotation).replace("typing.", "")


def _in_words(annotation: Any) -> str:
    """Return a type as numpydoc writes it, without None, which stands for no value."""
    text = type_text(annotation).replace(" | None", "").replace("collections.abc.", "")
    text = re.sub(r"Literal\[(.*?)\]", r"{\1}", text)
    return re.sub(r"\b(list|Iterable)\[(\w+)\]", r"\1 of \2", text).replace(" | ", " or ")
