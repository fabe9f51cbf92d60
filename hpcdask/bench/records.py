"""What the bench prints: lines for the user on stderr, records as JSON on stdout."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from hpcdask.bench.cluster import Cluster
from hpcdask.workloads import Check, Form

__all__ = ["Case", "announce", "decimal_bytes", "record", "report", "say"]


@dataclass(frozen=True)
class Case:
    """What is measured.

    Parameters
    ----------
    workload
        Its name.
    form
        ``"tuned"`` or ``"stock"``.
    shape, dtype
        Of the array that is computed with.
    n_chunks, largest
        How many chunks it has, and the shape of the largest.
    """

    workload: str
    form: Form
    shape: tuple[int, int]
    dtype: str
    n_chunks: int
    largest: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def say(text: str) -> None:
    """Print one line for the user on stderr."""
    click.echo(f"hpcdask: {text}", err=True)


def announce(case: Case, cluster: Cluster) -> None:
    """Say in one line what is about to be measured, and on what."""
    say(
        f"{case.workload} {decimal_bytes(case.nbytes)} {case.dtype} on {cluster}, {case.form}, "
        f"{case.n_chunks} chunks of {case.largest[0]} x {case.largest[1]}"
    )


def decimal_bytes(nbytes: int) -> str:
    """Write a size in powers of a thousand: ``2.0 TB``."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if nbytes >= 10**power:
            return f"{nbytes / 10**power:.1f} {unit}"
    return f"{nbytes} B"


def record(
    case: Case,
    cluster: Cluster,
    seconds: list[float],
    n_tasks: int,
    result: dict[str, Any],
    checks: list[Check],
) -> dict[str, Any]:
    """Put a measurement in the form that is written as JSON; sizes in bytes, times in seconds."""
    median = statistics.median(seconds)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "cupy": cluster.cupy}
    for package in ("dask", "distributed", "hpcdask"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "workload": case.workload,
        "form": case.form,
        "shape": list(case.shape),
        "dtype": case.dtype,
        "chunks": {"count": case.n_chunks, "largest": list(case.largest)},
        "bytes": case.nbytes,
        "seconds": seconds,
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "GB/s": case.nbytes / median / 1e9,
        "dask_tasks": n_tasks,
        "devices": cluster.devices,
        "workers": sum(cluster.devices.values()),
        "threads": cluster.n_slots,
        "result": result,
        "checks": [check.as_dict() for check in checks],
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report(line: dict[str, Any], json_file: str | None) -> int:
    """Print a record, append it to a file, and return the exit code: 1 if a check failed."""
    text = json.dumps(line)
    click.echo(text)
    if json_file is not None:
        with Path(json_file).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    say(
        f"median {line['seconds_median']:.3f} s, min {line['seconds_min']:.3f} s, "
        f"max {line['seconds_max']:.3f} s of {len(line['seconds'])}; {line['GB/s']:.1f} GB/s, "
        f"{line['dask_tasks']} Dask tasks"
    )
    failed = [check for check in line["checks"] if not check["ok"]]
    for check in failed:
        say(
            f"check failed: {check['name']} is {check['value']}, "
            f"expected {check['expected']} within {check['tolerance']}"
        )
    return 1 if failed else 0
