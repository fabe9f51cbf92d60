"""Use of GPUs in a run: sums over their samples, and what was wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

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
    """The sums of one GPU: seconds a worker had it, those sampled, and what counters rose by."""

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
        """Add what happened between two samples; with another sampler, sums begin anew."""
        self.label, self.model = now.label, now.model or "GPU"
        self.memory_total = now.memory_total
        if before is None:
            before = now
        elif now.began != before.began:  # counters of the device go on, sums do not
            before = replace(before, sampled_s=0.0, busy_s=0.0, peak_memory=0, held_back_s={})
        rose = before.peak_memory != now.peak_memory  # between two samples that were told
        peaks = (self.peak_memory, now.peak_memory if rose else now.memory_used)
        self.peak_memory = max((one for one in peaks if one is not None), default=None)
        self.sampled_s += now.sampled_s - before.sampled_s
        if now.busy_s is not None:
            self.busy_s = (self.busy_s or 0.0) + now.busy_s - (before.busy_s or 0.0)
        for reason, seconds in now.held_back_s.items():
            more = seconds - before.held_back_s.get(reason, 0.0)
            self.held_back_s[reason] = self.held_back_s.get(reason, 0.0) + more
        for name in COUNTERS:
            if (value := getattr(now, name)) is not None:
                earlier = getattr(before, name)
                more = 0 if earlier is None else max(0, value - earlier)
                setattr(self, name, (getattr(self, name) or 0) + more)

    @property
    def utilisation(self) -> float | None:
        """Mean utilisation in percent."""
        if self.busy_s is None or not self.sampled_s:
            return None
        return 100 * self.busy_s / self.sampled_s


@dataclass(frozen=True)
class RunUsage(Record):
    """Use of all GPUs of a run together; None is what NVML did not tell.

    Attributes
    ----------
    models
        How many GPUs of each model.
    gpu_hours, energy_kwh
        In all.
    utilisation
        Mean, in percent.
    peak_memory, memory_total
        Bytes, of the GPU that had most in use.
    nvlink_bytes
        Sent over NVLink, in all.
    problems
        What was wrong, by GPU.
    """

    models: dict[str, int]
    gpu_hours: float
    utilisation: float | None
    peak_memory: int | None
    memory_total: int | None
    energy_kwh: float | None
    nvlink_bytes: float | None
    problems: list[str]

    def line(self) -> str:
        """All of it in one line, without the problems."""
        from dask.utils import format_bytes

        parts = [", ".join(f"{count} x {model}" for model, count in self.models.items())]
        parts.append(f"{self.gpu_hours:.3g} GPU hours")
        busy = "unknown" if self.utilisation is None else f"{self.utilisation:.0f} %"
        parts.append(f"mean utilisation {busy}")
        if self.peak_memory is None:
            parts.append("peak memory unknown")
        else:
            of = f" of {format_bytes(self.memory_total)}" if self.memory_total else ""
            parts.append(f"peak memory {format_bytes(self.peak_memory)}{of}")
        energy = "unknown" if self.energy_kwh is None else f"{self.energy_kwh:.3g} kWh"
        parts.append(f"energy {energy}")
        if self.nvlink_bytes is not None:
            parts.append(f"{format_bytes(int(self.nvlink_bytes))} over NVLink")
        return ", ".join(parts)

    def lines(self) -> list[str]:
        """Return the lines for the user at the end of a run."""
        return [f"GPUs: {self.line()}", *(f"warning: {one}" for one in self.problems)]


def summary(gpus: Sequence[GpuUsage]) -> RunUsage | None:
    """Sum up the GPUs; None if none was sampled."""
    gpus = [one for one in gpus if one.label]
    if not gpus:
        return None
    known = [one for one in gpus if one.busy_s is not None and one.sampled_s]
    seconds = sum(one.sampled_s for one in known)
    fullest = max(gpus, key=lambda one: one.peak_memory or 0)
    energy, nvlink = _total(gpus, "energy_j"), _total(gpus, "nvlink_sent")
    return RunUsage(
        models=dict(Counter(one.model for one in gpus)),
        gpu_hours=sum(one.held_s for one in gpus) / 3600,
        utilisation=100 * sum(one.busy_s or 0 for one in known) / seconds if seconds else None,
        peak_memory=fullest.peak_memory,
        memory_total=fullest.memory_total,
        energy_kwh=None if energy is None else energy / JOULES_PER_KWH,
        nvlink_bytes=nvlink,
        problems=_problems(gpus),
    )


def _total(gpus: Iterable[GpuUsage], name: str) -> float | None:
    """The sum of what is known; None if a GPU does not tell."""
    values = [getattr(one, name) for one in gpus]
    return None if None in values else sum(values)


def _problems(gpus: Sequence[GpuUsage]) -> list[str]:
    found = []
    for reason in sorted({reason for one in gpus for reason in one.held_back_s}):
        least = HELD_BACK.get(reason, SELDOM)
        parts = {one.label: _part(one, reason) for one in gpus if _part(one, reason) >= least}
        if parts:
            most = max(parts.values())
            text = f"clocks were held back by {reason}, up to {100 * most:.0f} % of the time"
            found.append(f"{text}: {_names(parts)}")
    for name, what in (("ecc_uncorrected", "uncorrected"), ("ecc_corrected", "corrected")):
        errors = {one.label: int(getattr(one, name)) for one in gpus if getattr(one, name)}
        if errors:
            count = plural(sum(errors.values()), f"{what} ECC error")
            found.append(f"{count} of memory: {_names(errors)}")
    idle = [
        one.label
        for one in gpus
        if one.sampled_s >= LEAST_S and (one.utilisation or 0) < IDLE and one.busy_s is not None
    ]
    if idle:
        found.append(f"idle, with a mean utilisation below {IDLE:.0f} %: {_names(idle)}")
    return found


def _part(gpu: GpuUsage, reason: str) -> float:
    return gpu.held_back_s.get(reason, 0.0) / gpu.sampled_s if gpu.sampled_s else 0.0


def _names(labels: Iterable[str]) -> str:
    return some(sorted(labels, key=natural), NAMED)
