"""Output of the bench: lines for the user on stderr, records as JSON, numbers with units."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from hpcdask.bench.cluster import Cluster
from hpcdask.logs import say
from hpcdask.workloads import Form

#: Phases that are shorter would be told as 0.00 s.
LEAST_TOLD_S = 0.005
#: Name of a rate to what a workload has to wait for.
LIMIT_NAMES = {
    "memory": "memory speed",
    "random": "generator speed",
    "matrix_float64": "float64 matrix speed",
    "matrix_float32": "float32 matrix speed",
    "link": "exchange speed",
}


@dataclass(frozen=True)
class Case:
    """Measured case: an array of ``n_chunks`` chunks, the ``largest`` of that shape.

    ``variant`` tells which of several computations of the workload.
    """

    workload: str
    form: Form
    shape: tuple[int, int]
    dtype: str
    n_chunks: int
    largest: tuple[int, int]
    variant: str = ""

    @property
    def label(self) -> str:
        """A short name for charts and tables."""
        return f"{self.workload}{self.variant and f' {self.variant}'}, {self.form}"

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def name_of(record: Mapping[str, Any]) -> str:
    """Return the label of a record, or what stands for one."""
    return str(record.get("label") or f"{record['workload']} {record.get('form') or ''}".strip())


def counts(record: Mapping[str, Any]) -> str:
    """Write what a record was measured on: ``8 x NVIDIA H200``."""
    return ", ".join(f"{n} x {name}" for name, n in (record.get("devices") or {}).items())


def failed(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the checks that failed."""
    return [check for check in record.get("checks") or () if not check["ok"]]


def complaint(check: Mapping[str, Any]) -> str:
    """Say what a failed check found."""
    return (
        f"{check['name']} is {check['value']}, "
        f"expected {check['expected']} within {check['tolerance']}"
    )


def announce(case: Case, cluster: Cluster) -> None:
    """Say in one line what is about to be measured, and on what."""
    say(
        f"{case.label}: {decimal_bytes(case.nbytes)} {case.dtype} on {cluster}, "
        f"{case.n_chunks} chunks of {case.largest[0]} x {case.largest[1]}"
    )


def decimal(value: float, unit: str) -> str:
    """Write a quantity with the prefix of a power of a thousand: ``2.0 TB``."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def decimal_bytes(nbytes: float) -> str:
    """Write a size in the units of ``--size``."""
    return decimal(nbytes, "B")


def rate(gigabytes: float) -> str:
    """Write GB/s with the unit that suits it: ``12.3 MB/s``."""
    return f"{decimal_bytes(1e9 * gigabytes)}/s"


def reached(record: Mapping[str, Any]) -> str:
    """Return what part of its limit a record reached, and what that limit is; "" without one."""
    if not (limit := record.get("limit")):
        return ""
    percent = 100 * limit["fraction"]
    return f"{percent:.{0 if percent >= 1 else 1}f} % of {LIMIT_NAMES[limit['by']]}"


def describe(cluster: Cluster) -> dict[str, Any]:
    """On what, with what and when it was measured."""
    versions = {"python": platform.python_version(), "numpy": np.__version__, "cupy": cluster.cupy}
    for package in ("dask", "distributed", "hpcdask"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "devices": cluster.devices,
        "workers": sum(cluster.devices.values()),
        "threads": cluster.n_slots,
        "hosts": cluster.hosts,
        "protocols": cluster.protocols,
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def tell(line: dict[str, Any], json_file: Path | None, *, as_json: bool = True) -> int:
    """Print a record, append it to a file, and return the exit code: 1 if a check failed."""
    text = json.dumps(line)
    if as_json:
        click.echo(text)
    if json_file is not None:
        with json_file.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    say(_summary(line))
    for check in failed(line):
        say(f"check failed: {complaint(check)}")
    return 1 if failed(line) else 0


def _summary(line: dict[str, Any]) -> str:
    if "phases" in line and "GB/s" not in line:
        told = [part for part in line["phases"] if part["seconds"] >= LEAST_TOLD_S]
        parts = (f"{part['name']} {part['seconds']:.2f} s" for part in told)
        whole = f"{line['seconds_max']:.2f} s until the last of {line['workers']} workers"
        return f"{whole}: {'; '.join(parts)}"
    return (
        f"median {line['seconds_median']:.3f} s, min {line['seconds_min']:.3f} s, "
        f"max {line['seconds_max']:.3f} s of {len(line['seconds'])}; {rate(line['GB/s'])}, "
        f"{line['dask_tasks']} Dask tasks"
    )
