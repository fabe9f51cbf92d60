"""The table of the Dask blog of January 2019: one computation on four kinds of hardware.

One core, all cores, one GPU and all GPUs of this machine, each in a cluster of its own: a command
``hpcdask bench array`` in a process of its own, one after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from hpcdask.bench.array import PUBLISHED_NBYTES, published
from hpcdask.bench.records import decimal_bytes
from hpcdask.bench.summary import WIDE
from hpcdask.bootstrap.reexec import interpreter
from hpcdask.errors import ClusterError
from hpcdask.logs import say
from hpcdask.workloads import Device

#: Seconds that one cluster may take, from its start to its end.
DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Row:
    """A kind of hardware, and the cores and GPUs (for CUDA_VISIBLE_DEVICES) to use; None is all."""

    name: str
    device: Device
    cores: frozenset[int] | None = None
    gpus: str | None = None


def rows(cores: set[int], gpus: Sequence[str]) -> list[Row]:
    """Return the kinds of hardware of these cores and UUIDs of GPUs."""
    found = [Row("one CPU core", "cpu", frozenset({min(cores)}))]
    if len(cores) > 1:
        found.append(Row(f"{len(cores)} CPU cores", "cpu"))
    if gpus:
        found.append(Row("one GPU", "cuda", gpus=gpus[0]))
    if len(gpus) > 1:
        found.append(Row(f"{len(gpus)} GPUs", "cuda"))
    return found


def run_row(row: Row, nbytes: int, repeats: int) -> list[dict[str, Any]]:
    """Measure both forms of the array workload on one kind of hardware, within an hour."""
    command = [
        *(*interpreter(), "-m", "hpcdask.bench", "array", "--device", row.device),
        *("--size", f"{nbytes}B", "--form", "both", "--repeats", str(repeats)),
    ]
    environment = dict(os.environ)
    if row.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = row.gpus
    cores = os.sched_getaffinity(0)
    say(f"{row.name}: {decimal_bytes(nbytes)}")
    try:
        if row.cores is not None:
            os.sched_setaffinity(0, row.cores)  # children inherit it
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise ClusterError(
            f"{row.name}: no result after {DEADLINE_S:g} s; try a smaller --size and --cpu-size"
        ) from exc
    finally:
        os.sched_setaffinity(0, cores)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise ClusterError(f"{row.name}: exit code {done.returncode}: {last[0]}")
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        line["label"] = f"{row.name}, {line['form']}"
        line["published"] = published(row.device, row.name)
    return lines


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the table on stderr; times scaled to the blog's size are said to be so."""
    table = Table(title="(normal(10, 1) + 1)[::2, ::2].sum() of float64", title_justify="left")
    table.add_column("hardware, form")
    for name in ("size", "seconds", "spread", "GB/s", "of the limit", "2 TB takes", "blog, 2 TB"):
        table.add_column(name, justify="right")
    for line in lines:
        scale = PUBLISHED_NBYTES / line["bytes"]
        known = line["published"]
        table.add_row(
            line["label"],
            decimal_bytes(line["bytes"]),
            f"{line['seconds_median']:.3g}",
            f"{line['seconds_min']:.3g} to {line['seconds_max']:.3g}",
            f"{line['GB/s']:.3g}",
            f"{line['limit']['fraction']:.0%}",
            f"{line['seconds_median'] * scale:.3g} s{'' if abs(scale - 1) < 0.01 else ' (scaled)'}",
            f"{known[0]['seconds']:g} s" if known else "",
        )
    Console(stderr=True, width=None if sys.stderr.isatty() else WIDE).print(table)
