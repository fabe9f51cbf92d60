"""Use of GPUs in a run: sums over their samples, and problems that these show."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dask.utils import format_bytes

from hpcdask.logs import natural, plural, some
from hpcdask.spec.records import Record

from .samples import GpuState

#: Parts of the time for which clocks may be held back before it is worth a line, by reason.
OFTEN, SELDOM = 0.1, 0.01
HELD_BACK = {"power cap": OFTEN, "sync boost": OFTEN}
#: Mean utilisation in percent below which a GPU was idle, and seconds before that says anything.
IDLE, LEAST_S = 5.0, 10.0
JOULES_PER_KWH = 3.6e6
RISING = ("energy_j", "nvlink_sent", "ecc_corrected", "ecc_uncorrected")


@dataclass
class GpuUsage:
    """Sums of one GPU over states of its workers: seconds, and rises of known counters."""

    label: str = ""
    model: str = ""
    seconds: float = 0.0
    busy_s: float | None = None
    peak_memory: int | None = None
    memory_total: int | None = None
    held_back_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rises: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, before: GpuState | None, now: GpuState) -> None:
        """Add a state, and the rise of the counters since the one before."""
        seconds = 0.0 if before is None else now.time - before.time
        self.label, self.model = now.label, now.model or "GPU"
        self.memory_total = now.memory_total
        if now.memory_used is not None:
            self.peak_memory = max(self.peak_memory or 0, now.memory_used)
        self.seconds += seconds
        if now.utilisation is not None:
            self.busy_s = (self.busy_s or 0.0) + seconds * now.utilisation / 100
        for reason in now.held_back or ():
            self.held_back_s[reason] += seconds
        for name in RISING:
            if (rise := now.rise(before, name)) is not None:
                self.rises[name] += rise


@dataclass(frozen=True)
class RunUsage(Record):
    """Use of all GPUs of a run together; None where NVML did not tell.

    `models` has the number of GPUs of each model. `utilisation` is the mean in percent, and
    `peak_memory` of the GPU that had most in use. `problems` are one line each, with the GPUs.
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

    def lines(self) -> list[str]:
        """Return the lines for the user at the end of a run."""
        models = ", ".join(f"{count} x {model}" for model, count in self.models.items())
        hours, busy, peak, energy, nvlink = (text or "unknown" for text in self.cells().values())
        line = f"GPUs: {models}, {hours} GPU hours, mean utilisation {busy}, peak memory {peak}"
        line += f", energy {energy}"
        line += "" if self.nvlink_bytes is None else f", {nvlink} over NVLink"
        return [line, *(f"warning: {problem}" for problem in self.problems)]


def summary(gpus: Iterable[GpuUsage]) -> RunUsage | None:
    """Return the sums over GPUs; None if none was sampled."""
    gpus = sorted(gpus, key=lambda gpu: natural(gpu.label))
    if not gpus:
        return None
    seconds = sum(gpu.seconds for gpu in gpus if gpu.busy_s is not None)
    fullest = max(gpus, key=lambda gpu: gpu.peak_memory or 0)
    energy = _total(gpus, "energy_j")
    return RunUsage(
        models=dict(Counter(gpu.model for gpu in gpus)),
        gpu_hours=sum(gpu.seconds for gpu in gpus) / 3600,
        utilisation=100 * sum(gpu.busy_s or 0 for gpu in gpus) / seconds if seconds else None,
        peak_memory=fullest.peak_memory,
        memory_total=fullest.memory_total,
        energy_kwh=None if energy is None else energy / JOULES_PER_KWH,
        nvlink_bytes=_total(gpus, "nvlink_sent"),
        problems=list(_problems(gpus)),
    )


def _total(gpus: Sequence[GpuUsage], counter: str) -> float | None:
    """Return the sum; None if a GPU does not tell its part."""
    if any(counter not in gpu.rises for gpu in gpus):
        return None
    return sum(gpu.rises[counter] for gpu in gpus)


def _problems(gpus: Sequence[GpuUsage]) -> Iterator[str]:
    for reason in sorted({reason for gpu in gpus for reason in gpu.held_back_s}):
        parts = {gpu.label: gpu.held_back_s[reason] / (gpu.seconds or 1) for gpu in gpus}
        if often := [label for label in parts if parts[label] >= HELD_BACK.get(reason, SELDOM)]:
            most, names = f"{100 * max(parts.values()):.0f} %", some(often)
            yield f"clocks were held back by {reason}, up to {most} of the time: {names}"
    for kind in ("uncorrected", "corrected"):
        errors = {gpu.label: n for gpu in gpus if (n := int(gpu.rises.get(f"ecc_{kind}", 0)))}
        if errors:
            count = plural(sum(errors.values()), f"{kind} ECC error")
            yield f"{count} of memory: {some(errors)}"
    known = [gpu for gpu in gpus if gpu.seconds >= LEAST_S and gpu.busy_s is not None]
    if idle := [gpu.label for gpu in known if 100 * (gpu.busy_s or 0) < IDLE * gpu.seconds]:
        yield f"idle, with a mean utilisation below {IDLE:.0f} %: {some(idle)}"
