"""``hpcdask submit`` on a real SLURM, as a user types it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcdask.cli import main
from launching import clean_environment, describe, end, leftovers, wait_for
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


class Login:
    """A user in a folder with an odd name; HOME and TMPDIR show what is left behind."""

    def __init__(self, site: SlurmSite) -> None:
        self.site = site
        self.home = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
        self.folder = self.home / "my runs; 100%j"
        self.folder.mkdir()
        (self.home / "tmp").mkdir()
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        name, value = self.marker.split("=")
        folders = {"HOME": str(self.home), "TMPDIR": str(self.home / "tmp")}
        self.started: list[subprocess.Popen[str]] = []
        self.env = {**clean_environment(), **site.env, **folders, name: value}

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start ``hpcdask submit words...``."""
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcdask.cli", "submit", *words],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        """Run it to its end, and return its stdout and stderr."""
        return self.end(self.start(*words), code)

    def end(self, process: subprocess.Popen[str], code: int) -> tuple[str, str]:
        """Wait for its end, which must have this code."""
        out, err = process.communicate(timeout=180)
        assert process.returncode == code, (out, err)
        assert "Traceback" not in err
        return out, err

    def here(self, *words: str, code: int = 0) -> Result:
        """Run ``hpcdask words...`` in this process, as this user, to its end."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name in os.environ.keys() - self.env.keys():
                patch.delenv(name)
            for name, value in self.env.items():
                patch.setenv(name, value)
            result = CliRunner().invoke(main, list(words))
        assert result.exit_code == code, (result.output, result.exception)
        return result

    def running(self, count: int) -> list[str]:
        """Wait until so many jobs run, and return their ids, oldest first."""

        def found() -> list[str]:
            done = self.site.run("squeue", "-h", "-o", "%A", "-t", "running", "-S", "i")
            return ids if len(ids := done.stdout.split()) == count else []

        return wait_for(found, 30, f"{count} running jobs", interval=0.2)

    def scripts(self) -> list[Path]:
        return list((self.home / ".hpcdask/submitted").glob("*"))


@pytest.fixture
def login(slurm: SlurmSite) -> Iterator[Login]:
    login = Login(slurm)
    try:
        yield login
        slurm.cancel_all()
        wait_for(lambda: not leftovers(login.marker), 10, describe(leftovers(login.marker)))
        assert not [*(login.home / "tmp").iterdir(), *login.home.rglob("*.pem")]
    finally:
        end(leftovers(login.marker))
        for process in login.started:
            process.communicate()
        shutil.rmtree(login.home, ignore_errors=True)


def test_a_program_from_the_command_line_to_its_exit_code(login: Login):
    """Two nodes, odd names all the way, output on stdout, what is said on stderr."""
    (login.folder / ODD).write_text(PROGRAM)
    words = (ODD, "--wait", "a b", "it's", '"; #%j', "$HOME")
    shape = ("-N", "2", "--gpus-per-node", "1", "-t", "0:10:00", "--cpus-per-gpu", "1")
    more = ("--mem", "1GiB", "--prologue", """export SAID='a; "b" #c %j'""")
    settings = ("--directive", "#SBATCH --requeue", "--run", "--device cpu --nthreads 1")
    out, err = login.run("--wait", *shape, *more, *settings, *words, code=3)
    assert "workers 2 of 2 nodes\n" in out
    assert f'words {list(words[1:])!r} prologue a; "b" #c %j\n' in out
    assert "mode 0o100644\n" in out  # the job's umask is the user's
    (log,) = login.folder.glob("*.log")
    job = log.stem.removeprefix("hpcdask-")
    assert log.read_text() == out
    assert log.stat().st_mode & 0o777 == 0o600
    assert err.splitlines()[:2] == [
        f"hpcdask: job {job} submitted to SLURM",
        f"hpcdask: log {log}",
    ]
    assert err.splitlines()[-1] == f"hpcdask: job {job} failed, exit code 3"
    (script,) = login.scripts()
    assert script.stat().st_mode & 0o777 == 0o700
    shown = login.site.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%j|%l|%D|%b|%C|%m")
    # Newer SLURM has gres/gpu
    assert shown.stdout.replace("gres/", "gres:") == f"{ODD}|10:00|2|gres:gpu:1|2|1G\n"


@pytest.mark.long
def test_what_ends_a_job_that_is_waited_for(login: Login):
    """scancel of a running one, Ctrl-C with a running one, SIGTERM with one that is pending."""
    (login.folder / "sleep.py").write_text("")
    run = ("--wait", *QUICK, "--prologue", "echo started; exec sleep 600", "sleep.py")
    cancelled = login.start(*run)
    first = login.running(1)
    interrupted = login.start("--system", "slurm", *run)
    second = login.running(2)[-1]
    pending = login.start("-N", "4", "--directive", "--exclusive", *run)
    assert pending.stderr is not None
    wait_for(lambda: "is pending (" in pending.stderr.readline(), 20, "the job that waits")

    listed = login.here("cleanup", "--yes").stdout
    assert listed.count("kept 1 job of hpcdask submit") == 3  # though no notebook holds them
    assert login.here("jobs").stdout.count("hpcdask submit") == 3

    pending.terminate()  # first: it would start once the others leave it the nodes
    out, err = login.end(pending, 143)
    assert not out
    assert "hpcdask: SIGTERM: cancelling job" in err
    os.killpg(interrupted.pid, signal.SIGINT)
    login.site.run("scancel", *first)
    out, err = login.end(cancelled, 1)
    assert out.startswith("started\n")
    assert out.count("CANCELLED") == 1  # SLURM's own word, in the log
    assert f"hpcdask: job {first[0]} was cancelled" in err.splitlines()[-1]
    out, err = login.end(interrupted, 130)
    assert out.startswith("started\n")
    assert f"hpcdask: SIGINT: cancelling job {second}" in err
    assert err.splitlines()[-1] == f"hpcdask: job {second} is cancelled and gone"
    assert not login.site.run("squeue", "-h", "-t", "pending,running").stdout


def test_a_job_that_no_partition_is_large_enough_for(login: Login):
    (login.folder / "train.py").write_text("")
    job = login.start("-N", "9", "--wait", *QUICK, "train.py")
    assert job.stderr is not None
    told = "is pending (PartitionNodeLimit), and may never start. What partitions have: sinfo -o "
    wait_for(lambda: told in job.stderr.readline(), 20, "a warning")
    job.terminate()
    login.end(job, 143)


def test_what_is_refused_and_what_is_not_waited_for(login: Login):
    (login.folder / "train.py").write_text("")
    err = login.here("submit", "-q", "nix; 'no'", "train.py", code=1).stderr
    (script,) = login.scripts()
    assert "sbatch refused the job: invalid partition specified: nix; 'no'" in err
    assert f"Script kept at {script}" in err
    assert "sinfo -s" in err
    err = login.here("submit", "--gpus-per-node", "3", "train.py", code=1).stderr
    assert "Requested node configuration is not available" in err
    assert len(login.scripts()) == 2
    done = login.here("submit", *QUICK, "--prologue", "echo done; exit 0", "train.py")
    assert not done.stderr
    job, log = done.stdout.splitlines()
    assert job.startswith("job ")
    assert job.endswith(" submitted to SLURM")
    path = Path(log.removeprefix("log "))
    wait_for(lambda: path.exists() and path.read_text() == "done\n", 20, "the job")
