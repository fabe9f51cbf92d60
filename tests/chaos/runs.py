"""The arena of the runner: real launchers, exchanges between workers, and faults amid them."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import psutil
import pytest

from chaos.episodes import Episode, Event
from chaos.hosts import Hosts, disk, over
from chaos.hosts import missing as missing_hosts
from chaos.playing import Player, Undo, Violation, strike
from gpu_launching import device_memory_is_back, sharing, used_memory
from hpcdask.gpu.devices import visible_gpus
from launching import Launcher, describe, mpich_launcher, name_of, openmpi_launcher, wait_for
from running import Running, Site, no_launcher
from slurm_site import SlurmSite, missing_programs

LAUNCHERS = {"openmpi": openmpi_launcher, "mpich": mpich_launcher, "alone": no_launcher}
PROGRAMS = Path(__file__).parent / "programs"
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
#: Seconds until all is gone: what a node lost is noticed after 10, and machines are busy.
GONE_S = 40.0
#: Lines that say why: the runner's own, Python's, and the launchers'.
WHY = re.compile(
    r"hpcdask: error: |hpcdask: SIG|Traceback \(most|mpirun noticed|prterun|PRTE|PMIX ERROR|"
    r"Abort\(|"
    r"BAD TERMINATION|KILLED BY|srun: error|srun: Job step|slurmstepd: error|\[mpiexec@|\[proxy"
)
#: A worker that cannot start for so long is given up.
RESTARTS_S = 10
#: After a fault of these, tracebacks are the program's, or those of Python's resource tracker.
TRACED = {"program", "scheduler", "network", "full", "rank", "launcher", "daemon", "helper"}
HARMLESS = ("worker", "janitor", "helper")


class RunnerArena:
    """Plays episodes of the runner; `device` is ``cpu`` or ``cuda``."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._stack = contextlib.ExitStack()
        self._slurm: SlurmSite | None = None
        self.without = self._look()

    def _look(self) -> dict[str, str]:
        """What cannot be played here, and why."""
        without = {}
        for name, make in LAUNCHERS.items():
            try:
                make()
            except (pytest.skip.Exception, pytest.fail.Exception) as error:
                without[name] = str(error)
        if why := missing_hosts():
            without |= {"hosts": why, "disk": why}
        elif "mpich" in without:
            without["hosts"] = without["mpich"]
        if missing := missing_programs():
            without["srun"] = f"SLURM is not installed, missing {' '.join(missing)}"
        return without

    def close(self) -> None:
        """End what all episodes share."""
        self._stack.close()

    def left_out(self, episode: Episode) -> str:
        """Say why an episode cannot be played here."""
        disk_of = "disk" if episode.options.get("disk") else ""
        return self.without.get(episode.options["launcher"], "") or self.without.get(disk_of, "")

    def play(self, episode: Episode) -> str:
        """Return what came out of it. Raises Violation."""
        with contextlib.ExitStack() as stack:
            hosts = None
            if episode.options["launcher"] == "hosts":
                hosts = stack.enter_context(Hosts(self._folder))
            site = stack.enter_context(Site(self._launcher(episode.options["launcher"], hosts)))
            if episode.options.get("disk"):
                stack.enter_context(disk(site.tmp, 8))
            return Run(episode, site, hosts, self._device).play()

    def _launcher(self, name: str, hosts: Hosts | None) -> Launcher:
        if name == "srun":
            if self._slurm is None:
                self._slurm = self._stack.enter_context(SlurmSite(nodes=2, gpus_per_node=0))
            self._slurm.mend()
            return Launcher("srun", ["srun", "-N2", "--mpi=none", "--overcommit"], self._slurm.env)
        if hosts is not None:
            return over(hosts, "mpich")
        return LAUNCHERS[name]()


class Run:
    """One run of one episode."""

    def __init__(self, episode: Episode, site: Site, hosts: Hosts | None, device: str) -> None:
        self.episode, self.site, self.hosts, self.device = episode, site, hosts, device
        self.options = episode.options
        self._workers = site.folder / "workers"
        self._workers.mkdir()
        count = self.options["n"]
        self._alone = self.options["launcher"] == "alone"
        self._wanted = count  # or what there is: without a launcher there may be more
        self._file = ["--scheduler-file", "cluster.json"] if self.options.get("file") else []
        self._used = used_memory() if device == "cuda" else []
        self.run = self._start()
        self.player = Player(self.printed, self.over, self.fire)
        self._roles: set[str] = set()
        self._away = float("-inf"), float("-inf")  # since when the network was lost, and until when

    def _start(self) -> Running:
        arguments = ["--preload", str(PROGRAMS / "pids.py")]
        if self.options["workers_min"]:
            arguments += ["--workers-min", "1"]
        arguments += ["--timeout", "60"]  # srun does not end ranks that wait for a dead one
        arguments += self._file
        if self.device == "cuda" and (pool := sharing(self.options["n"], visible_gpus())):
            arguments += [*pool, "--protocol", "ucx"]
        kind = "cupy" if self.device == "cuda" else "numpy"
        arguments += [str(PROGRAMS / "exchange.py"), str(self._wanted), kind]
        env = {"CHAOS_WORKERS": str(self._workers)}
        n = self.options["n"]
        return self.site.start(*arguments, n=n, env=env, device=self.device)

    def printed(self) -> list[str]:
        """Lines of standard output."""
        return list(self.run.lines["out"])

    def over(self) -> bool:
        """Whether the launcher has ended."""
        return self.run.process.poll() is not None

    # Faults

    def fire(self, event: Event) -> tuple[str, Undo | None]:
        """Cause a fault."""
        if event.fault == "network":
            assert self.hosts is not None
            # a launcher that cannot reach its hosts does not try again
            passes = self._away_for(event.lasts) <= 6 and event.mark != "start"
            self._roles.add("blip" if passes else "network")
            if not passes and self.options["workers_min"]:
                (self.site.folder / "fewer").touch()
            self.hosts.join(up=False)
            return str(event), lambda: self.hosts.join(up=True)
        if event.fault == "full":
            self._roles.add("full")
            if event.lasts > RESTARTS_S:
                (self.site.folder / "fewer").touch()
            return str(event), self._fill_disk()
        if event.fault == "full device":
            (self.site.folder / "full device").touch()
            return str(event), None
        role, _, index = event.who.partition(" ")
        roles = self.roles()
        if role == "any":
            found = sorted((p.pid, p, r) for r, group in roles.items() for p in group)
            candidates = [(p, r) for _, p, r in found]
        else:
            candidates = [(p, role) for p in roles.get(role, ())]
        if not candidates:
            return "", None
        process, role = candidates[int(index) % len(candidates)]
        early = role in HARMLESS and not any(line.startswith("ready") for line in self.printed())
        self._roles.add("early" if early else "stop" if event.fault == "STOP" else role)
        if role == "helper" and event.fault != "STOP":  # it may be the resource tracker, also early
            self._roles.add(role)
        if (role, event.fault) == ("rank", "INT"):  # which passes it on
            self._roles.add("program")
        harmless = ("worker", "janitor") if event.fault in ("KILL", "SEGV") else HARMLESS
        if self.options["workers_min"] and role not in harmless and event.fault != "STOP":
            (self.site.folder / "fewer").touch()
        return f"{event.fault} of {role} {process.pid} at {event.mark}", strike(
            process, event.fault
        )

    def _away_for(self, lasts: float) -> float:
        """Seconds from the first to the end of losses that may look like one: few probes pass."""
        now = time.monotonic()
        start, end = self._away
        self._away = start if now < end + 10 else now, max(end, now + lasts)
        return self._away[1] - self._away[0]

    def _fill_disk(self) -> Undo:
        path = self.site.tmp / "ballast"
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as ballast:
            while ballast.write(bytes(2**16)):
                pass
        return lambda: path.unlink(missing_ok=True)

    def roles(self) -> dict[str, list[psutil.Process]]:
        """The processes of the run by what they are."""
        told = next((line.split()[1:] for line in self.printed() if line.startswith("pids ")), ())
        known = {int(pid): name for pid, name in zip(told, ("program", "scheduler"), strict=False)}
        known |= {int(path.name): "worker" for path in self._workers.iterdir()}
        found: dict[str, list[psutil.Process]] = {}
        for process in sorted(self.site.processes(), key=lambda process: process.pid):
            with contextlib.suppress(psutil.Error, OSError):
                found.setdefault(known.get(process.pid) or self._role(process), []).append(process)
        return found

    def _role(self, process: psutil.Process) -> str:
        if process.pid == self.run.process.pid or name_of(process) == "srun":
            return "rank" if self._alone else "launcher"
        if not self._alone and not any(name in process.environ() for name in RANKS):
            return "daemon"
        parent = process.parent()
        if process.cwd() == "/" and os.getsid(process.pid) == process.pid:
            return "janitor"
        inside = parent is not None and any(name in parent.environ() for name in RANKS)
        return "helper" if inside or self._alone else "rank"

    # What must hold

    def play(self) -> str:
        """Play it and check."""
        try:
            self.player.play(self.episode)
            (self.site.folder / "stop").touch()
            self.player.finish()
        except Violation as error:
            running = describe(self.site.processes())
            raise Violation(f"{error}\n--- running\n{running}\n{self.run.output()}") from None
        self._check()
        return f"code {self.run.process.returncode}, {', '.join(self.player.hits) or 'nothing hit'}"

    def _check(self) -> None:
        problems = self._left()
        code = self.run.process.returncode
        out, err = ("".join(self.run.lines[name]) for name in ("out", "err"))
        done = "\ndone\n" in out
        fatal = self._roles - {*HARMLESS, "stop", "blip"}
        if "the process that manages the workers" in err:  # one of the helpers
            fatal.add("agent")
        if "; given up\n" in err:
            fatal.add("worker")
        if "wrong" in out or "\nbad" in out:
            problems.append("a result is wrong")
        if (code == 0) != done and not (done and fatal):
            problems.append(f"code {code}, but the program was {'' if done else 'not '}done")
        if code and not fatal:
            problems.append(f"code {code}, and nothing was hit that a run cannot do without")
        told = {"program", "launcher", "daemon"} | ({"rank"} if self._alone else set())
        if code and not (WHY.search(err + out) or fatal & told):  # who signals those knows why
            problems.append(f"code {code}, and no line says why")
        if "Traceback (most" in err and not self._roles & TRACED:
            problems.append("a traceback")
        there = re.search(r"^workers (\d+) of (\d+)$", out, re.MULTILINE)
        # without its fork server a rank starts no worker again, and is given up after 15 s
        fewer = fatal or "helper" in self._roles
        lost = (self.options["workers_min"] and fewer) or "full" in fatal
        if done and not lost and (there is None or int(there[1]) < int(there[2])):
            problems.append(f"at the end {there and there[0]}")
        if problems:
            hits = "\n".join(self.player.hits)
            raise Violation(
                "\n".join([*problems, "--- hits", hits, self.run.output(), f"code {code}"])
            )

    def _left(self) -> list[str]:
        """What is still there. SLURM kills janitors with a step: there the next run sweeps."""
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self.site.processes(), GONE_S)
        for reader in self.run.readers:
            reader.join(5)
        killed = self._roles & {"janitor", "launcher", "rank", "daemon", "helper", "early"}
        swept = "janitor" in killed or (self.options["launcher"] == "srun" and killed)
        if swept and not self.site.processes() and self.files():
            self._sweep()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not (self.site.processes() or self.files()), GONE_S)
        parts = [*describe(self.site.processes()).splitlines(), *self.files()]
        if self._used:
            with contextlib.suppress(AssertionError):
                wait_for(lambda: device_memory_is_back(self._used), GONE_S, interval=1)
            if not device_memory_is_back(self._used):
                parts.append(f"device memory: {used_memory()} MiB in use, {self._used} before")
        return [f"left behind: {part}" for part in parts]

    def files(self) -> list[str]:
        """Folders, keys and scheduler files."""
        return [*self.site.files(), *map(str, self.site.folder.glob("cluster.json"))]

    def _sweep(self) -> None:
        (self.site.folder / "nothing.py").write_text("")
        n = self.options["n"]
        run = self.site.start(*self._file, "nothing.py", n=n)
        if code := run.process.wait(120):
            raise Violation(f"the next run ended with exit code {code}\n{run.output()}")
