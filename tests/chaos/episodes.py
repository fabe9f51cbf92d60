"""Episodes: what is started and which faults come when, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Over while the notebook computes.
SHORT = "00:01:00"
#: What commands of the queue do.
HOWS = ("refuses", "rejects", "hangs", "works and hangs")
SIGNALS = ("KILL", "KILL", "KILL", "STOP", "STOP", "TERM", "INT", "SEGV", "HUP")


@dataclass(frozen=True)
class Event:
    """A fault: once its mark was printed, `delay` seconds later, to whom, and for how long."""

    mark: str
    delay: float
    fault: str
    who: str = ""
    lasts: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.lasts:g} s" if self.lasts else ""
        return f"{self.mark}+{self.delay:g}: {self.fault} {self.who}".rstrip() + lasts


@dataclass(frozen=True)
class Episode:
    """One run, or one notebook with its jobs, and what goes wrong meanwhile."""

    arena: str
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def __str__(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.arena} SEED={self.seed} {options} [{'; '.join(map(str, self.events))}]"


def draw(arena: str, seed: int) -> Episode:
    """Return the episode of a seed, the same on every machine."""
    rng = random.Random(f"{arena} {seed}")
    options, event = {"runner": _runner, "gpu": _gpu, "jobs": _jobs}[arena](rng)
    events = tuple(event() for _ in range(rng.choice((1, 1, 2, 2, 3))))
    return Episode(arena, seed, options, events)


Drawn = tuple[dict[str, Any], Callable[[], Event]]


def _moment(rng: random.Random, marks: Sequence[str]) -> dict[str, Any]:
    return {"mark": rng.choice(marks), "delay": round(rng.choice((0, 0.3, 1.5)) * rng.random(), 2)}


def _runner(rng: random.Random) -> Drawn:
    launcher = rng.choice(
        ("openmpi", "openmpi", "mpich", "mpich", "srun", "srun", "hosts", "alone")
    )
    n = {"alone": 1, "hosts": 2}.get(launcher) or rng.choice((2, 2, 3))
    options = {
        "launcher": launcher,
        "n": n,
        "workers_min": rng.random() < 0.3,
        "file": rng.random() < 0.3,
        "disk": rng.choice((None, None, None, "tmp")),
    }
    whos = ("worker", "worker", "worker", "rank", "rank", "launcher", "program", "scheduler")
    others = ("janitor", "helper", "daemon", "any")

    def event() -> Event:
        moment = _moment(rng, ("start", "ready", "exchange", "exchange", "exchange"))
        if launcher == "hosts" and rng.random() < 0.6:
            return Event(**moment, fault="network", lasts=rng.choice((1, 4, 25)))
        if options["disk"] and rng.random() < 0.6:
            return Event(**moment, fault="full", lasts=rng.choice((2, 600)))
        fault = rng.choice(SIGNALS)
        who = f"{rng.choice((*whos, *others))} {rng.randrange(8)}"
        lasts = round(rng.choice((1, 6)) * rng.random(), 2) if fault == "STOP" else 0.0
        return Event(**moment, fault=fault, who=who, lasts=lasts)

    return options, event


def _gpu(rng: random.Random) -> Drawn:
    def event() -> Event:
        moment = _moment(rng, ("ready", "exchange", "exchange", "exchange"))
        fault = rng.choice(("KILL", "KILL", "KILL", "SEGV", "STOP", "full device"))
        who = f"{rng.choice(('worker', 'worker', 'worker', 'rank', 'program', 'scheduler'))} "
        who = "" if fault == "full device" else who + str(rng.randrange(2))
        return Event(**moment, fault=fault, who=who, lasts=2.0 if fault == "STOP" else 0.0)

    launcher = rng.choice(("openmpi", "openmpi", "alone"))
    n = {"alone": 1}.get(launcher, 2)
    return {"launcher": launcher, "n": n, "workers_min": False}, event


#: Faults of job clusters: who they are for, and the seconds after which they are taken back.
JOB_FAULTS: dict[str, tuple[Sequence[str], Sequence[float]]] = {
    **dict.fromkeys(("KILL", "STOP", "TERM", "INT", "SEGV", "HUP"), (("worker", "job"), (3,))),
    "daemon": (("slurmctld", "munged", "slurmd", "slurmstepd"), (0.5, 4, 10)),
    "job": (("scancel", "requeue", "suspend", "hold"), (2, 6)),
    "node": (("drain", "down"), (3, 8)),
    "command": (("sbatch", "squeue", "scancel", "scontrol"), (2, 8)),
    "notebook": (("KILL", "TERM", "INT", "HUP", "STOP", "KILL+watchdog"), (3,)),
}


def _jobs(rng: random.Random) -> Drawn:
    walltime = SHORT if rng.random() < 0.07 else "00:10:00"
    options = {
        "n": rng.choice((1, 2, 2, 3)),
        "adapt": rng.random() < 0.25,
        "walltime": walltime,
    }

    def event() -> Event:
        moment = _moment(rng, ("start", "watchdog", "ready", "batch", "batch", "batch"))
        faults = [name for name in JOB_FAULTS if name != "notebook"]
        fault = rng.choice((*faults, "daemon", "daemon", "job", "job", "node", "command"))
        if rng.random() < 0.12:
            fault = "notebook"
        whos, lasts = JOB_FAULTS[fault]
        who, how = rng.choice(whos), rng.choice(HOWS)
        who = f"{who} {how}" if fault == "command" else f"{who} {rng.randrange(4)}"
        return Event(**moment, fault=fault, who=who, lasts=float(rng.choice(lasts)))

    return options, event
