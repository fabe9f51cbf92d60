"""Measurement of one workload on one cluster: JSON, table, report and comparison read it.

Its limit is the part of the workload that takes longest at the rates of the hardware: the roofline
model (Williams, Waterman, Patterson, Communications of the ACM 52(4), 2009), with more roofs.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np
from dask.utils import format_bytes, format_time

from hpcdask.gpu.usage import RunUsage
from hpcdask.spec.records import Record
from hpcdask.workloads import Check

#: Version of the JSON lines. Files of another one cannot be compared.
VERSION = 1
#: Rates of the hardware, which are also the units of work: what a workload waits for, what the
#: rate counts, and its unit in billions.
RATES = {
    "memory": ("memory speed", "memory, read and written", "GB/s"),
    "random": ("generator speed", "random float64 normals", "billion/s"),
    "matrix_float64": ("float64 matrix speed", "matrix products, float64", "GFLOP/s"),
    "matrix_float32": ("float32 matrix speed", "matrix products, float32", "GFLOP/s"),
}


@dataclass(frozen=True)
class Limit:
    """Least seconds of a workload, the rate that decides, and the part of it that was reached."""

    seconds: float
    by: str
    fraction: float

    def __str__(self) -> str:
        percent = 100 * self.fraction
        return f"{percent:.{0 if percent >= 1 else 1}f} % of {RATES[self.by][0]}"


@dataclass(frozen=True)
class Pair(Record):
    """Transfers from one worker to another, by their numbers: of a block, and of 8 bytes."""

    sender: int
    receiver: int
    over: str
    seconds: tuple[float, ...]
    latency_s: tuple[float, ...]


@dataclass(frozen=True)
class Exchange(Record):
    """Exchange between workers, of which `hosts` has the node of each, and `slow` the warnings.

    A block has `block_nbytes` between pairs, and `all_to_all_nbytes` where all send at once.
    """

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    block_nbytes: int
    pairs: tuple[Pair, ...]
    all_to_all_nbytes: int
    slow: tuple[str, ...] = ()

    def rates(self) -> dict[tuple[int, int], float]:
        """Return the GB/s of each pair, by the median."""
        nbytes = self.block_nbytes / 1e9
        return {(p.sender, p.receiver): nbytes / statistics.median(p.seconds) for p in self.pairs}

    def latencies(self) -> list[float]:
        """Return the seconds that 8 bytes take in each repeat: the median of all pairs."""
        rounds = zip(*(pair.latency_s for pair in self.pairs), strict=True)
        return [statistics.median(times) for times in rounds]


#: Fields that two measurements have in common if their times can be compared.
KEY = (
    *("workload", "form", "variant", "shape", "dtype", "k", "chunk_nbytes", "block_nbytes"),
    *("devices", "workers"),
)


@dataclass(frozen=True, kw_only=True)
class Measurement(Record):
    """Times of a computation, its checks, and the cluster that it was measured on.

    `chunk_nbytes` is what ``--chunk-size`` asked for. `devices` counts each GPU once, however many
    workers share it. `moved` are the bytes that GB/s counts, if not those of the array; `work` is
    the least that the hardware has to do and `rates` what it can do in a second, by `RATES`.
    """

    workload: str
    form: str = ""
    variant: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    k: int | None = None
    chunk_nbytes: int | None = None
    block_nbytes: int | None = None
    devices: dict[str, int]
    workers: int
    threads: int = 1
    hosts: tuple[str, ...] = ()
    processors: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    date: str = ""
    seconds: tuple[float, ...] = ()
    dask_tasks: int = 0
    moved: int | None = None
    result: dict[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    work: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    gpus: RunUsage | None = None
    exchange: Exchange | None = None
    version: int = VERSION

    @property
    def label(self) -> str:
        """Short name, for charts and tables."""
        return ", ".join(filter(None, [f"{self.workload} {self.variant}".strip(), self.form]))

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes; 0 without one."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.shape else 0

    @property
    def key(self) -> str:
        """Return what identifies the measurement, by `KEY`."""
        return json.dumps([getattr(self, name) for name in KEY], sort_keys=True)

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)

    @property
    def gb_per_s(self) -> float:
        """GB/s of the median; 0 where nothing is counted in bytes."""
        return (self.nbytes if self.moved is None else self.moved) / self.median / 1e9

    @property
    def limit(self) -> Limit | None:
        """Least time that the hardware allows; None if its rates are not known."""
        if not (self.work and self.rates):
            return None
        seconds, by = max((amount / self.rates[name], name) for name, amount in self.work.items())
        return Limit(seconds, by, seconds / self.median)

    @property
    def failed(self) -> list[str]:
        """Failed checks, each in one line."""
        return [
            f"{one.name} is {one.value}, expected {one.expected} within {one.tolerance}"
            for one in self.checks
            if not one.ok
        ]

    @property
    def where(self) -> str:
        """Devices in words: ``8 x NVIDIA H200``."""
        return ", ".join(f"{count} x {name}" for name, count in self.devices.items())

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `from_json`, and what a reader of the JSON would compute."""
        derived = {
            "label": self.label,
            "bytes": self.nbytes,
            "seconds_median": self.median,
            "seconds_min": min(self.seconds),
            "seconds_max": max(self.seconds),
            "GB/s": self.gb_per_s,
            "limit": self.limit and asdict(self.limit),
        }
        checks = [{**asdict(one), "ok": one.ok} for one in self.checks]
        return {**super().to_json(), "checks": checks, **derived}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_json` and JSON made of one."""
        kept = {one.name: data[one.name] for one in fields(cls) if one.name in data}
        names = [one.name for one in fields(Check)]
        checks = [Check(*(one[name] for name in names)) for one in data["checks"]]
        return super().from_json({**kept, "checks": checks})

    def cells(self) -> dict[str, str]:
        """Return the texts of a table's row by column; what the measurement lacks is empty."""
        limit = self.limit
        return {
            "workload": self.label,
            "size": format_bytes(self.nbytes) if self.nbytes else "",
            "median": format_time(self.median),
            "least to greatest": " to ".join(format_time(of(self.seconds)) for of in (min, max)),
            "rate": rate(self.gb_per_s) if self.gb_per_s else "",
            "limit": format_time(limit.seconds) if limit else "",
            "of the limit": str(limit) if limit else "",
            "Dask tasks": f"{self.dask_tasks:,}" if self.dask_tasks else "",
            **(self.gpus.cells() if self.gpus else {}),
            "problems of GPUs": "; ".join(self.gpus.problems) if self.gpus else "",
        }


def rate(billions: float, unit: str = "GB/s") -> str:
    """Write a rate with three digits or more, so that little is never told as zero."""
    return f"{billions:,.0f} {unit}" if billions >= 100 else f"{billions:.3g} {unit}"


def hardware_rate(name: str, per_s: float) -> str:
    """Write one of `RATES`."""
    return rate(per_s / 1e9, RATES[name][2])
