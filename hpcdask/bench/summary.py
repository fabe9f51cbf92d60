"""The table at the end of a bench on a terminal: each workload's time beside its limit."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from dask.utils import format_time
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpcdask.bench.limits import LIMITS
from hpcdask.bench.records import decimal_bytes, failed, name_of, rate, reached

#: Processes of Open MPI above a rank, which gives each rank a terminal of its own.
OPEN_MPI = {"mpirun", "mpiexec", "prterun", "orterun", "prted", "orted"}
TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
#: Columns with room in 80 characters.
HEADS = ("workload", "size", "median", "rate", "limit", "of the limit")
#: Characters of a line that goes to a file or pipe.
WIDE = 120


def console(*, stderr: bool = False) -> Console:
    """Return a console of standard output or standard error, as wide as its terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDE)


def is_terminal() -> bool:
    """Return whether standard output is a terminal, or below Open MPI's mpirun whether its is."""
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
        table.add_column(head, justify="right" if head in HEADS[1:5] else "left", overflow="fold")
    for line in lines:
        if line["workload"] != LIMITS:
            row = cells(line)
            told = Text("check failed", style="red") if failed(line) else row["of the limit"]
            table.add_row(*(row[head] for head in HEADS[:-1]), told)
    if table.row_count:
        console().print("", table)


def cells(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a record for a table by column; what the record lacks is empty."""
    limit = record.get("limit")
    least, greatest = format_time(record["seconds_min"]), format_time(record["seconds_max"])
    shape = " x ".join(f"{n:,}" for n in record.get("shape", ()))
    return {
        "workload": name_of(record),
        "array": f"{shape} {record.get('dtype', '')}".strip(),
        "size": decimal_bytes(record["bytes"]) if "bytes" in record else "",
        "median": format_time(record["seconds_median"]),
        "least to greatest": f"{least} to {greatest}",
        "rate": rate(record["GB/s"]) if "GB/s" in record else "",
        "limit": format_time(limit["seconds"]) if limit else "",
        "of the limit": reached(record),
        "Dask tasks": f"{record['dask_tasks']:,}" if "dask_tasks" in record else "",
    }
