"""Keywords of workers and runs: their types, and signatures and docstrings that name them.

`hpcdask.spec.specs` has their texts and defaults. None stands for a value that nobody gave.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Union, get_args, get_origin

Device = Literal["auto", "cuda", "cpu"]
Protocol = Literal["auto", "tcp", "ucx"]


class WorkerKeywords(TypedDict, total=False):
    """Fields of `WorkerSpec` but ``protocol`` and ``name``, which mean more to clusters."""

    device: Device | None
    interface: str | None
    port_range: str | None
    nthreads: int | None
    memory_limit: str | float | None
    enable_nvlink: bool | None
    rmm_pool_size: str | int | float | None
    rmm_async: bool | None
    rmm_allocator_external_lib_list: str | Iterable[str] | None
    device_memory_limit: str | int | float | None
    local_directory: str | None
    resources: str | Mapping[str, float] | None
    preload: str | Iterable[str] | None
    preload_nanny: str | Iterable[str] | None
    lifetime: str | float | None
    lifetime_stagger: str | float | None
    lifetime_restart: bool | None
    death_timeout: str | float | None


class RunKeywords(WorkerKeywords, total=False):
    """Fields of `RunSpec`."""

    protocol: Protocol | None
    name: str | None
    scheduler_file: str | None
    dashboard_address: str | None
    tls: bool | None
    groups: str | Mapping[str, int] | tuple[str, ...] | None
    oversubscribe: bool | None
    timeout: str | float | None
    workers_min: int | None


class InitializeKeywords(RunKeywords, total=False):
    """Keywords of `hpcdask.initialize`, which takes those of dask-mpi, too."""

    nanny: Literal[True] | None
    worker_class: Literal["distributed.Worker", "distributed.Nanny"] | None
    comm: None
    dashboard: bool | None


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
    only = inspect.Parameter.KEYWORD_ONLY
    spelled = [
        inspect.Parameter(name, only, default=default, annotation=kind)
        for name, kind, _, default in keywords
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[*own, *spelled])


def describe(doc: str, keywords: Iterable[Keyword]) -> str:
    """Return a docstring with keywords in the place of ``**keywords`` and its text."""
    described = ""
    for name, kind, text, _ in keywords:
        kind_text = type_text(kind).replace(" | None", "").replace("collections.abc.", "")
        described += f"{name} : {kind_text}\n"
        described += textwrap.indent(textwrap.fill(text, 88), "    ") + "\n"
    plain = inspect.cleandoc(doc) + "\n"  # Python 3.13 has taken the indent away already
    text = re.sub(r"^\*\*\w+\n(?:    .*\n)*", lambda _: described, plain, flags=re.M)
    return textwrap.indent(text, "    ").strip()


def type_text(annotation: Any) -> str:
    """Return an annotation as it is written, the same in every Python."""
    if annotation is types.NoneType:
        return "None"
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(type_text, get_args(annotation)))
    return inspect.formatannotation(annotation).replace("typing.", "")
