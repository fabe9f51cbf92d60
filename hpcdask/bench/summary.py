"""The table at the end of a bench on a terminal: each workload's time beside its limit."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcdask.bench.limits import LIMITS
from hpcdask.bench.records import decimal_bytes, duration, failed, name_of, rate, reached

#: Processes of Open MPI above a rank, which gives each rank a terminal of its own.
OPEN_MPI = {"mpirun", "mpiexec", "prterun", "orterun", "prted", "orted"}
TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
#: Each column; "#" is for numbers. They have room in 80 characters.
HEADS = ("workload", "#size", "#median", "#rate", "#limit", "of the limit")
#: Columns of a table that goes to a file or pipe.
WIDE = 120


def is_terminal() -> bool:
    """Whether standard output is a terminal; below Open MPI's mpirun, whether mpirun's is."""
    if not sys.stdout.isatty():
        return False
    above = [process.pid for process in psutil.Process().parents() if process.name() in OPEN_MPI]
    if not above:
        return True
    try:
        return os.readlink(Path("/proc", str(above[0]), "fd", "1")).startswith(TERMINALS)
    except OSError:
        return False  # another user's, or gone


@contextlib.contextmanager
def shown(lines: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Print the table of these records at the end if there is a terminal, also after a failure."""
    try:
        yield
    finally:
        if is_terminal():
            show(lines)


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each record that has a time on standard output."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in HEADS:
        name = head.removeprefix("#")
        table.add_column(name, justify="left" if name == head else "right", overflow="fold")
    for line in lines:
        if line["workload"] != LIMITS:
            table.add_row(*_row(line))
    if table.row_count:
        width = None if sys.stdout.isatty() else WIDE
        Console(highlight=False, width=width).print("", table)


def _row(line: Mapping[str, Any]) -> list[Text]:
    limit = line.get("limit")
    cells = [
        name_of(line),
        decimal_bytes(line["bytes"]) if "bytes" in line else "",
        duration(line["seconds_median"]),
        rate(line["GB/s"]) if "GB/s" in line else "",
        duration(limit["seconds"]) if limit else "",
    ]
    beside = Text("check failed", style="red") if failed(line) else Text(reached(line))
    return [*map(Text, cells), beside]
