"""hpcdask under dask-mpi's names, as a program has it that changes the import.

Two choices are in every call here that a program makes by itself: workers on the CPU, and no TLS,
as these tests connect by an address alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import hpcdask


def initialize(**keywords: Any) -> bool:
    """Start the cluster, with a worker in every rank."""
    return hpcdask.initialize(device="cpu", tls=False, **keywords)


def execute(
    client_function: Callable[..., None],
    client_args: Iterable[Any] = (),
    *,
    exclusive_workers: bool = True,
    client_rank: int = 1,
    scheduler_rank: int = 0,
    **keywords: Any,
) -> None:
    """Do what docs/launching.md has in its place: the function's lines after the start."""
    initialize(**keywords)
    client_function(*client_args)
