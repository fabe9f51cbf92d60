"""Use of GPUs in a run: sums over their samples, and problems that these show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dask.utils import format_bytes

from hpcdask.logs import natural, plural, some
from hpcdask.spec.records import Record

from .samples import GpuSample

#: Parts of the time for which clocks may be held back before it is worth a line, by reason.
OFTEN, SELDOM = 0.1, 0.01
HELD_BACK = {"power cap": OFTEN, "sync boost": OFTEN}
#: Mean utilisation in percent below which a GPU was idle, and seconds before that says anything.
IDLE, LEAST_S = 5.0, 10.0
#: GPUs that a line names.
NAMED = 8
JOULES_PER_KWH = 3.6e6
COUNTERS = ("energy_j", "nvlink_sent", "ecc_corrected", "ecc_uncorrected")


@dataclass
class GpuUsage:
    """Sums of one GPU: seconds held by a worker, seconds sampled, and rises of counters."""

    label: str = ""
    model: str = ""
    held_s: float = 0.0
    sampled_s: float = 0.0
    busy_s: float | None = None
    peak_memory: int | None = None
    memory_total: int | None = None
    energy_j: float | None = None
    nvlink_sent: float | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    held_back_s: dict[str, float] = field(default_factory=dict)

    def add(self, before: GpuSample | None, now: GpuSample) -> None:
        """Add a sample, and the rise of the counters since the one before."""
        seconds = 0.0 if before is None else now.time - before.time
        self.label, self.model = now.label, now.model or "GPU"
        self.memory_total = now.memory_total
        if now.memory_used is not None:
            self.peak_memory = max(self.peak_memory or 0, now.memory_used)
        self.sampled_s += seconds
        if now.utilisation is not None:
            self.busy_s = (self.busy_s or 0.0) + seconds * now.utilisation / 100
        for reason in now.held_back or ():
            self.held_back_s[reason] = self.held_back_s.get(reason, 0.0) + seconds
        for name in COUNTERS:
            if (value := getattr(now, name)) is not None:
                earlier = value if before is None else getattr(before, name) or 0
                setattr(self, name, (getattr(self, name) or 0) + max(0, value - earlier))


@dataclass(frozen=True)
class RunUsage(Record):
    """Use of all GPUs of a run together; None where NVML did not tell.

    Attributes
    ----------
    models
        Number of GPUs of each model.
    utilisation
        Mean, in percent.
    peak_memory, memory_total
        Bytes of the GPU that had most in use.
    nvlink_bytes
        Sent over NVLink by all.
    problems
        One line each, with the GPUs.
    """

    models: dict[str, int]
    gpu_hours: float
    utilisation: float | None
    peak_memory: int | None
    memory_total: int | None
    energy_kwh: float | None
    nvlink_bytes: float | None
    problems: list[str]

    def cells(self) -> dict[str, str]:
        """Return the texts of a table's row by column, empty where unknown."""
        peak, nvlink = self.peak_memory, self.nvlink_bytes
        of = f" of {format_bytes(self.memory_total)}" if self.memory_total else ""
        return {
            "GPU hours": f"{self.gpu_hours:.3g}",
            "mean utilisation": "" if self.utilisation is None else f"{self.utilisation:.0f} %",
            "peak memory": "" if peak is None else f"{format_bytes(peak)}{of}",
            "energy": "" if self.energy_kwh is None else f"{self.energy_kwh:.3g} kWh",
            "over NVLink": "" if nvlink is None else format_bytes(int(nvlink)),
        }

    def line(self) -> str:
        """Return everything but the problems in one line."""
        models = ", ".join(f"{count} x {model}" for model, count in self.models.items())
        hours, busy, peak, energy, nvlink = (one or "unknown" for one in self.cells().values())
        line = (
            f"{models}, {hours} GPU hours, mean utilisation {busy}, peak memory {peak}, "
            f"energy {energy}"
        )
        return line if self.nvlink_bytes is None else f"{line}, {nvlink} over NVLink"

    def lines(self) -> list[str]:
        """Return the lines for the user at the end of a run."""
        return [f"GPUs: {self.line()}", *(f"warning: {one}" for one in self.problems)]


def summary(gpus: Sequence[GpuUsage]) -> RunUsage | None:
    """Return the sums over GPUs; None if none was sampled."""
    gpus = [one for one in gpus if one.label]
    if not gpus:
        return None
    known = [one for one in gpus if one.busy_s is not None and one.sampled_s]
    seconds = sum(one.sampled_s for one in known)
    fullest = max(gpus, key=lambda one: one.peak_memory or 0)
    energy = _total(one.energy_j for one in gpus)
    return RunUsage(
        models=dict(Counter(one.model for one in gpus)),
        gpu_hours=sum(one.held_s for one in gpus) / 3600,
        utilisation=100 * sum(one.busy_s or 0 for one in known) / seconds if seconds else None,
        peak_memory=fullest.peak_memory,
        memory_total=fullest.memory_total,
        energy_kwh=None if energy is None else energy / JOULES_PER_KWH,
        nvlink_bytes=_total(one.nvlink_sent for one in gpus),
        problems=_problems(gpus),
    )


def _total(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if a GPU does not tell its part."""
    known = list(values)
    return None if None in known else sum(filter(None, known))


def _problems(gpus: Sequence[GpuUsage]) -> list[str]:
    found = []
    for reason in sorted({reason for one in gpus for reason in one.held_back_s}):
        parts = {one.label: one.held_back_s.get(reason, 0.0) / (one.sampled_s or 1) for one in gpus}
        least = HELD_BACK.get(reason, SELDOM)
        if often := {label: part for label, part in parts.items() if part >= least}:
            text = f"clocks were held back by {reason}, up to {max(often.values()):.0%} of the time"
            found.append(f"{text.replace('%', ' %')}: {_names(often)}")
    for name, what in (("ecc_uncorrected", "uncorrected"), ("ecc_corrected", "corrected")):
        errors = {one.label: int(getattr(one, name)) for one in gpus if getattr(one, name)}
        if errors:
            count = plural(sum(errors.values()), f"{what} ECC error")
            found.append(f"{count} of memory: {_names(errors)}")
    sampled = [one for one in gpus if one.sampled_s >= LEAST_S and one.busy_s is not None]
    idle = [one.label for one in sampled if 100 * (one.busy_s or 0) < IDLE * one.sampled_s]
    if idle:
        found.append(f"idle, with a mean utilisation below {IDLE:.0f} %: {_names(idle)}")
    return found


def _names(labels: Iterable[str]) -> str:
    return some(sorted(labels, key=natural), NAMED)
