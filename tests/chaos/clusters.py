"""The arena of job clusters: a real SLURM whose daemons, nodes, jobs and commands fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path

import psutil

from chaos.episodes import SHORT, Episode, Event
from chaos.playing import Player, Undo, Violation, strike
from launching import describe, end, leftovers, name_of, wait_for, walk
from login import Command
from slurm_login import ONE
from slurm_site import SlurmSite, missing_programs

NOTEBOOK = Path(__file__).parent / "programs" / "notebook.py"
#: Seconds until jobs, processes and keys are gone, the daemons being back.
GONE_S = 90.0
MISBEHAVE = {
    "refuses": "echo 'slurm: error: Unable to contact slurm controller' >&2; exit 1",
    "rejects": "echo 'sbatch: error: Invalid account or partition specified' >&2; exit 1",
    "hangs": "sleep 600",
    "works and hangs": '{real} "$@"; sleep 600',
}


class JobsArena:
    """Plays episodes of job clusters at one SLURM."""

    def __init__(self) -> None:
        self._site: SlurmSite | None = None
        self._spent = False

    def close(self) -> None:
        """End the SLURM."""
        if self._site is not None:
            self._site.close()
            self._site = None

    def _mended_site(self) -> SlurmSite:
        if self._spent:
            self.close()
        if self._site is not None:
            try:
                self._site.mend()
            except (AssertionError, RuntimeError):  # too much was killed in it
                self.close()
        if self._site is None:
            self._site = SlurmSite(nodes=3).__enter__()
        return self._site

    def left_out(self, episode: Episode) -> str:
        """Say why an episode cannot be played here."""
        missing = " ".join(missing_programs())
        return f"SLURM is not installed, missing {missing}" if missing else ""

    def play(self, episode: Episode) -> str:
        """Return what came out of it. Raises Violation."""
        site = self._mended_site()
        # a controller that was killed may bring old jobs back, and give their ids again
        self._spent = any(event.who.startswith("slurmctld") for event in episode.events)
        home = Path(tempfile.mkdtemp(prefix="hn-", dir="/tmp"))
        notebook = Notebook(episode, site, home)
        try:
            return notebook.play()
        finally:
            end(leftovers(notebook.marker))
            notebook.process.wait()
            shutil.rmtree(home, ignore_errors=True)


class Notebook:
    """One notebook of one episode, its jobs, and what is done to them."""

    def __init__(self, episode: Episode, site: SlurmSite, home: Path) -> None:
        self.episode, self.site, self.home = episode, site, home
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        self._folder = home / "clusters"
        (home / "bin").mkdir()
        (home / "workers").mkdir()
        self._commands = {name: Command(home / "bin", name) for name in MISBEHAVING}
        self.env = {
            **site.env,
            **dict([self.marker.split("=")]),
            "HOME": str(home),
            "PATH": f"{home}/bin{os.pathsep}{site.env['PATH']}",
            "CHAOS_WORKERS": str(home / "workers"),
            "DASK_DISTRIBUTED__WORKER__PRELOAD": str(NOTEBOOK.parent / "pids.py"),
        }
        keywords = {
            **ONE,
            "walltime": episode.options["walltime"],
            "shared_temp_directory": str(self._folder),
            "death_timeout": "30s",
            "job_extra_directives": ["--requeue"],
        }
        self._output = home / "output"
        command = [
            sys.executable,
            str(NOTEBOOK),
            json.dumps(keywords),
            json.dumps(episode.options),
        ]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=self.env,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self.player = Player(self.printed, lambda: self.process.poll() is not None, self.fire)
        self._ended_by = ""
        self._held: set[str] = set()  # by us

    def printed(self) -> list[str]:
        """Lines of what it printed."""
        return self._output.read_text(errors="replace").splitlines(keepends=True)

    # Faults

    def fire(self, event: Event) -> tuple[str, Undo | None]:
        """Cause a fault."""
        who, _, rest = event.who.partition(" ")
        if event.fault == "command":
            command = self._commands[who]
            command.behave(MISBEHAVE[rest].format(real=command.real))
            return str(event), command.behave
        index = int(rest)
        if event.fault == "daemon":
            return self._strike_daemon(event, who, index)
        if event.fault == "notebook":
            return str(event), self._strike_notebook(who)
        if event.fault == "node":
            node = self.site.nodes[index % len(self.site.nodes)]
            self._scontrol("update", f"nodename={node}", f"state={who}", "reason=chaos")
            return f"{event} {node}", partial(
                self._scontrol, "update", f"nodename={node}", "state=resume"
            )
        if event.fault == "job":
            return self._strike_job(event, who, index)
        found = self._processes(who)
        if not found:
            return "", None
        process = found[index % len(found)]
        return f"{event}: {process.pid}", strike(process, event.fault)

    def _scontrol(self, *words: str) -> bool:
        """Run scontrol; return whether slurmctld has answered."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = self.site.run("scontrol", *words, check=False, timeout=20)
            return not re.search("contact|timed out|authenticat|munge", done.stderr, re.I)
        return False

    def _processes(self, who: str) -> list[psutil.Process]:
        """Workers, or all processes of jobs, in the order of their ids."""
        ours = sorted(leftovers(self.marker), key=lambda process: process.pid)
        if who == "worker":
            known = {int(path.name) for path in (self.home / "workers").iterdir()}
            return [process for process in ours if process.pid in known]
        jobs = {process.pid for process in leftovers("\0HPCDASK_JOB_ID=")}
        return [process for process in ours if process.pid in jobs]

    def _strike_daemon(self, event: Event, name: str, index: int) -> tuple[str, Undo | None]:
        if name == "slurmstepd":
            steps = {}
            for process in leftovers(self.marker):
                with contextlib.suppress(psutil.Error):
                    steps |= {p.pid: p for p in process.parents() if name_of(p).startswith(name)}
            if steps:
                pid = sorted(steps)[index % len(steps)]
                strike(steps[pid], "KILL")
            return f"{event}: {pid}" if steps else "", None
        daemons = self.site.daemons(name)
        daemon = daemons[index % len(daemons)]
        daemon.kill()
        daemon.wait()
        return str(event), lambda: self.site.restart(daemon)

    def _release(self) -> bool:
        """Release, as an administrator does, what SLURM holds and we do not.

        It holds a job that it could not start, and one that was suspended on a node that went down.
        """
        held: list[str] = []
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = self.site.run("squeue", "-h", "-r", "-o", "%i %r", check=False, timeout=20)
            held = [line.split()[0] for line in done.stdout.splitlines() if "held" in line.lower()]
        for job in {*held} - self._held:
            self._scontrol("release", job)
        return False  # again, as long as the notebook runs

    def _strike_notebook(self, how: str) -> Undo | None:
        signal_name, _, watchdog = how.partition("+")
        for child in psutil.Process(self.process.pid).children() if watchdog else ():
            if "watchdog" in " ".join(child.cmdline()):
                strike(child, "KILL")
        if signal_name != "STOP":
            self._ended_by = how
        return strike(psutil.Process(self.process.pid), signal_name)

    def _strike_job(self, event: Event, how: str, index: int) -> tuple[str, Undo | None]:
        jobs = sorted(self.jobs(), key=int)
        if not jobs:
            return "", None
        job = jobs[index % len(jobs)]
        undo: Undo | None = None
        if how == "scancel":
            self.site.run("scancel", job, check=False)
        elif how == "hold":
            self._held.add(job)
            self._scontrol("requeuehold", job)
            self._scontrol("hold", job)  # where it was pending
            undo = partial(self._held.discard, job)
        else:
            self._scontrol(how, job)
            undo = partial(self._scontrol, "resume", job) if how == "suspend" else None
        return f"{event}: {job}", undo

    # What must hold

    def jobs(self, *which: str) -> list[str]:
        """Ids of jobs of clusters that the queue holds."""
        done = self.site.run("squeue", "-h", "-r", "-o", "%i %k", *which, check=False)
        return [line.split()[0] for line in done.stdout.splitlines() if "hpcdask:" in line]

    def play(self) -> str:
        """Play it and check."""
        try:
            self.player.take_back_later(0, self._release)
            self.player.play(self.episode)
            if self.episode.options["walltime"] == SHORT:
                self.player.wait(lambda: time.monotonic() > self._started + 80, "")
            (self.home / "stop").touch()
            self.player.finish()
        except Violation as error:
            raise Violation(f"{error}\n{self._report()}") from None
        problems = self._problems()
        if problems:
            raise Violation("\n".join([*problems, self._report()]))
        return f"code {self.process.returncode}, {', '.join(self.player.hits) or 'nothing hit'}"

    def _problems(self) -> list[str]:
        problems, code, out = [], self.process.returncode, "".join(self.printed())
        done = "\ndone\n" in out
        if "\nwrong" in out:
            problems.append("a result is wrong")
        if not self._ended_by:
            troubled = any(event.fault in ("daemon", "command") for event in self.player.fired)
            said = re.search(r"hpcdask\.errors\.\w+: |^said ", out, re.MULTILINE)
            if not done and not (code and troubled and said and "workers" in out):
                problems.append(f"code {code}, and it was not done")
            there = re.search(r"^workers (\d+)$", out, re.MULTILINE)
            if done and (there is None or int(there[1]) < self.episode.options["n"]):
                problems.append(f"{there and there[1]} workers at the end")
        return [*problems, *self._left(done)]

    def _left(self, done: bool) -> list[str]:
        for command in self._commands.values():
            command.behave()
        try:
            self.site.bring_back()
            if self._ended_by.endswith("watchdog") or not done:
                with contextlib.suppress(AssertionError):
                    wait_for(
                        lambda: all(part.endswith("keys") for part in self.left()),
                        GONE_S,
                        interval=0.3,
                    )
                self._clean_up()  # what is left to it, as the manual says
            if any(event.who.startswith("slurmctld") for event in self.episode.events):
                # jobs that ended just before a controller was killed run in its saved state
                wait_for(lambda: not leftovers(self.marker), GONE_S, interval=0.3)
                for job in self.jobs("-t", "R"):
                    self.site.run("scancel", job, check=False)
            wait_for(lambda: not self.left(), GONE_S, interval=0.3)
        except AssertionError:
            return [f"left behind: {part}" for part in self.left()]
        return []

    def left(self) -> list[str]:
        """Jobs, processes and, if they are all that is left, keys."""
        found = [*self.jobs(), *describe(leftovers(self.marker)).splitlines()]
        return found or [str(path) for path in walk(self._folder) if path.name.endswith("keys")]

    def _clean_up(self) -> None:
        words = ("down", "--dead", "--yes", "--folder", str(self._folder))
        subprocess.run(
            [sys.executable, "-m", "hpcdask", *words],
            env=self.env,
            capture_output=True,
            timeout=120,
            check=False,
        )

    def _report(self) -> str:
        logs = [path for path in walk(self.home) if path.suffix == ".log" and path.is_file()]
        texts = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        queue = self.site.run("squeue", "-t", "all", check=False).stdout
        running = describe(leftovers(self.marker))
        hits = "\n".join(self.player.hits)
        parts = ["--- hits", hits, "--- output", *self.printed(), "--- queue", queue]
        return "\n".join([*parts, "--- running", running, *texts, self.site.log(30)])


MISBEHAVING = ("sbatch", "squeue", "scancel", "scontrol")
