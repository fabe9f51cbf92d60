"""``hpcdask submit`` on a real SLURM, as a user types it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import Launcher, clean_environment, wait_for
from running import Ended, Running, Site
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm

#: What every way from the command line to the program has to carry unchanged.
ODD = """it's; a "test" #1 %j $HOME.py"""
PROGRAM = """
import os, sys
from distributed import Client
with Client() as client:
    workers = client.nthreads()
    print("workers", len(workers), "of", os.environ["SLURM_JOB_NUM_NODES"], "nodes")
    print("words", sys.argv[1:], "prologue", os.environ["SAID"])
    with open("made", "w"):
        print("mode", oct(os.stat("made").st_mode))
sys.exit(3)
"""
#: Without Dask: what waits for a job does not care what it runs.
QUICK = ("--container", "env", "--run", "--device cpu")


class Login(Site):
    """A user in a folder with an odd name; HOME and TMPDIR show what is left behind."""

    def __init__(self, slurm: SlurmSite) -> None:
        super().__init__(Launcher("hpcdask submit", [], {**clean_environment(), **slurm.env}))
        self.slurm = slurm
        self.env = {**self.launcher.env, **self.env}
        self.place = self.folder / "my runs; 100%j"
        self.place.mkdir()

    def hpcdask(self, *words: str) -> Running:
        """Start ``hpcdask words...``."""
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcdask", *words],
            env=self.env,
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.runs.append(Running(self, process))
        return self.runs[-1]

    def submit(self, *words: str) -> Running:
        """Start ``hpcdask submit words...``."""
        return self.hpcdask("submit", *words)

    def running(self, count: int) -> list[str]:
        """Wait until so many jobs run, and return their ids, oldest first."""

        def found() -> list[str]:
            done = self.slurm.run("squeue", "-h", "-o", "%A", "-t", "running", "-S", "i")
            return ids if len(ids := done.stdout.split()) == count else []

        return wait_for(found, 30, f"{count} running jobs", interval=0.2)

    def scripts(self) -> list[Path]:
        return list((self.folder / ".hpcdask/submitted").glob("*"))


@pytest.fixture
def login(slurm: SlurmSite) -> Iterator[Login]:
    with Login(slurm) as login:
        yield login
        slurm.cancel_all()
        wait_for(lambda: not login.processes(), 10, "the processes to end")
        assert not [*login.tmp.iterdir(), *login.folder.rglob("*keys")]


def said(run: Running, text: str) -> None:
    """Wait until a line with this text was written to stderr."""
    run.wait_for(lambda: text in "".join(run.lines["err"]), text)


def check_end(run: Running, code: int) -> Ended:
    ended = run.end(60)
    assert ended.code == code, str(ended)
    assert "Traceback" not in ended.err
    return ended


def test_a_program_from_the_command_line_to_its_exit_code(login: Login):
    """Two nodes, odd names all the way, output on stdout, what is said on stderr."""
    (login.place / ODD).write_text(PROGRAM)
    words = (ODD, "--wait", "a b", "it's", '"; #%j', "$HOME")
    shape = ("-N", "2", "--gpus-per-node", "1", "-t", "0:10:00", "--cpus-per-gpu", "1")
    more = ("--mem", "1GiB", "--prologue", """export SAID='a; "b" #c %j'""")
    settings = ("--directive", "#SBATCH --requeue", "--run", "--device cpu --nthreads 1")
    ended = check_end(login.submit("--wait", *shape, *more, *settings, *words), 3)
    out, err = ended.out, ended.err
    assert "workers 2 of 2 nodes\n" in out
    assert f'words {list(words[1:])!r} prologue a; "b" #c %j\n' in out
    assert "mode 0o100644\n" in out  # the job's umask is the user's
    (log,) = login.place.glob("*.log")
    job = log.stem.removeprefix("hpcdask-")
    assert log.read_text() == out
    assert log.stat().st_mode & 0o777 == 0o600
    assert err.splitlines()[:2] == [
        f"hpcdask: job {job} submitted to SLURM",
        f"hpcdask: log {log}",
    ]
    end = "has ended: failed (NonZeroExitCode), exit code 3"
    assert err.splitlines()[-1] == f"hpcdask: job {job} {end}"
    (script,) = login.scripts()
    assert script.stat().st_mode & 0o777 == 0o700
    shown = login.slurm.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%j|%l|%D|%b|%C|%m")
    # Newer SLURM has gres/gpu
    assert shown.stdout.replace("gres/", "gres:") == f"{ODD}|10:00|2|gres:gpu:1|2|1G\n"


WHAT_ARRIVES = """
import os
from distributed import Client

def seen():
    return os.environ.get("MYVAR"), bool(os.environ.get("HOME"))

with Client() as client:
    print("seen", seen(), set(client.run(seen).values()))
"""


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("--directive", "--export=NONE"), {}),
        ((), {"SBATCH_EXPORT": "NONE"}),
        ((), {"SLURM_EXPORT_ENV": "NONE"}),
        pytest.param((), {"SBATCH_EXPORT": "HOME,USER"}, marks=pytest.mark.long),
        pytest.param((), {"SLURM_EXPORT_ENV": "HOME,USER"}, marks=pytest.mark.long),
    ],
)
def test_the_prologues_variables_reach_program_and_workers(
    login: Login, words: tuple[str, ...], variables: dict[str, str]
):
    """Regression: srun left them out where sbatch had --export=NONE or its like."""
    (login.place / "seen.py").write_text(WHAT_ARRIVES)
    login.env |= variables
    run = ("--wait", "-N", "2", "--device", "cpu", "--prologue", "export MYVAR=42")
    ended = check_end(login.submit(*run, *words, "seen.py"), 0)
    assert "seen ('42', True) {('42', True)}\n" in ended.out


@pytest.mark.long
def test_what_ends_a_job_that_is_waited_for(login: Login):
    """scancel of a running one, Ctrl-C with a running one, SIGTERM with one that is pending."""
    (login.place / "sleep.py").write_text("")
    run = ("--wait", *QUICK, "--prologue", "echo started; exec sleep 600", "sleep.py")
    cancelled = login.submit(*run)
    first = login.running(1)
    interrupted = login.submit("--system", "slurm", *run)
    second = login.running(2)[-1]
    pending = login.submit("-N", "4", "--directive", "--exclusive", *run)
    said(pending, "is pending (")

    kept = check_end(login.hpcdask("down", "--dead", "--yes"), 0).out
    assert kept.count("kept 1 job: hpcdask submit") == 3  # though no notebook holds them
    assert check_end(login.hpcdask("list", "--jobs"), 0).out.count("hpcdask submit") == 3

    pending.signal(signal.SIGTERM)  # first: it would start once the others leave it the nodes
    ended = check_end(pending, 143)
    assert not ended.out
    assert "hpcdask: SIGTERM: cancelling job" in ended.err
    os.killpg(interrupted.process.pid, signal.SIGINT)
    login.slurm.run("scancel", *first)
    ended = check_end(cancelled, 1)
    assert ended.out.startswith("started\n")
    assert ended.out.count("CANCELLED") == 1  # SLURM's own word, in the log
    assert f"hpcdask: job {first[0]} has ended: cancelled" in ended.err.splitlines()[-1]
    ended = check_end(interrupted, 130)
    assert ended.out.startswith("started\n")
    assert f"hpcdask: SIGINT: cancelling job {second}" in ended.err
    assert ended.err.splitlines()[-1] == f"hpcdask: job {second} is cancelled and gone"
    assert not login.slurm.run("squeue", "-h", "-t", "pending,running").stdout


def test_a_job_that_no_partition_is_large_enough_for(login: Login):
    (login.place / "train.py").write_text("")
    job = login.submit("-N", "9", "--wait", *QUICK, "train.py")
    said(job, "and may never start: PartitionNodeLimit. What partitions have: sinfo")
    job.signal(signal.SIGTERM)
    check_end(job, 143)


def test_what_is_refused_and_what_is_not_waited_for(login: Login):
    (login.place / "train.py").write_text("")
    err = check_end(login.submit("-q", "nix; 'no'", "train.py"), 1).err
    (script,) = login.scripts()
    assert "sbatch refused the job: invalid partition specified: nix; 'no'" in err
    assert f"Script kept at {script}" in err
    assert "sinfo -s" in err
    err = check_end(login.submit("--gpus-per-node", "3", "train.py"), 1).err
    assert "Requested node configuration is not available" in err
    assert len(login.scripts()) == 2
    done = check_end(login.submit(*QUICK, "--prologue", "echo done; exit 0", "train.py"), 0)
    assert not done.err
    job, log = done.out.splitlines()
    assert job.startswith("job ")
    assert job.endswith(" submitted to SLURM")
    path = Path(log.removeprefix("log "))
    wait_for(lambda: path.exists() and path.read_text() == "done\n", 20, "the job")
