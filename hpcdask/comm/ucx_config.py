"""Settings of UCX: ``--enable-nvlink``, the user's own ``UCX_TLS``, variables for a worker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from hpcdask.spec.specs import WorkerSpec

Link = Literal["nvlink", "infiniband"]
#: Names in ``UCX_TLS`` of a link, of the copies without which UCX sends no GPU memory, and of tcp.
NAMES: dict[str, re.Pattern[str]] = {
    "copies": re.compile(r"cuda|cuda_copy"),
    "nvlink": re.compile(r"cuda|cuda_ipc"),
    "infiniband": re.compile(r"ib|(rc|dc|ud)(_\w+)?"),
    "tcp": re.compile("tcp"),
}


def excluded_by(spec: WorkerSpec, tls: str, link: Link) -> str:
    """Return the setting that keeps UCX from a link; empty where none does."""
    if tls:
        return "" if permits(tls, link) else f"UCX_TLS={tls}"
    return "--disable-nvlink" if link == "nvlink" and spec.enable_nvlink is False else ""


def permits(tls: str, part: str) -> bool:
    """Return whether a value of ``UCX_TLS``, empty for none, leaves UCX a part of `NAMES`."""
    if not tls:
        return True
    names = [name.lstrip("\\") for name in tls.lstrip("^").split(",")]
    named = any(map(NAMES[part].fullmatch, names))
    return not named if tls.startswith("^") else named or "all" in names


def ucx_environment(spec: WorkerSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in a worker before UCX starts; the user's own stay."""
    found: dict[str, str] = {}
    if spec.enable_nvlink is False:
        found["UCX_TLS"] = "^cuda_ipc"
    if spec.port_range is not None:  # of the data's own connections, since UCX 1.16
        found["UCX_TCP_PORT_RANGE"] = spec.port_range
    return {name: value for name, value in found.items() if name not in environ}
