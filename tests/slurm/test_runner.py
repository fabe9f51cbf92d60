"""The runner under a real SLURM of several nodes: srun, sbatch, scancel, requeue."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from clock import stretched
from launching import (
    Launcher,
    mpich_launcher,
    name_of,
    openmpi_launcher,
    wait_for,
)
from running import PROGRAMS, Ended, Running, Site
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm


HOST = socket.gethostname()  # of every virtual node


RUN = "python -m hpcdask.run --device cpu"


COUNT = """
import os, sys
from distributed import Client
with Client() as client:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    print("workers", len(workers), "result", client.submit(sum, [1, 2]).result(), flush=True)
    print("limits", *(worker["memory_limit"] for worker in workers.values()), flush=True)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


COMPUTE = """
import time
from distributed import Client

def slow(x):
    time.sleep(0.2)
    return x

with Client() as client:
    futures = client.map(slow, range(40), pure=False)
    print("running", flush=True)
    print("sum", sum(client.gather(futures)), flush=True)
    print("workers", len(client.nthreads()), flush=True)
"""


class Desk(Site):
    """A user's folder at the SLURM: runs are steps of srun, or parts of a batch script."""

    def __init__(self, slurm: SlurmSite) -> None:
        super().__init__(Launcher("srun", ["srun"], slurm.env))
        self.slurm = slurm
        (self.folder / "count.py").write_text(COUNT)

    def srun(self, options: str, *words: str, **kwargs) -> Running:
        """Start ``srun OPTIONS -n N python -m hpcdask.run WORDS``."""
        self.launcher.prefix = ["srun", *options.split()]
        return self.start(*words, **kwargs)

    def sbatch(self, *options: str, script: str) -> tuple[int, Path]:
        """Submit a script; return the job's id and the file of all it prints."""
        path, output = self.folder / "job.sh", self.folder / "output"
        path.write_text(f"#!/bin/sh\n{script}\n")
        arguments = ("--output", output, "--chdir", self.folder, *options, path)
        return self.slurm.submit(*arguments, env={**self.launcher.env, **self.env}), output

    def end_of_job(self, job: int) -> int:
        """Wait for the job's end, and return its exit code."""
        self.slurm.wait_for_state(job, "COMPLETED", "FAILED", timeout=40)
        shown = self.slurm.run("scontrol", "show", "job", str(job)).stdout
        return int(shown.partition("ExitCode=")[2].partition(":")[0])

    def processes(self) -> list[psutil.Process]:
        """Return the processes of runs, without SLURM's own."""
        theirs = ("", "srun", "slurmstepd")
        return [one for one in super().processes() if name_of(one) not in theirs]

    def rank(self, index: int) -> psutil.Process:
        """Return the process of a rank, a child of SLURM's own."""
        (found,) = [
            process
            for process in self.processes()
            if process.environ().get("SLURM_PROCID") == str(index)
            and process.parent().name().startswith("slurmstepd")
        ]
        return found


@pytest.fixture
def desk(slurm: SlurmSite) -> Iterator[Desk]:
    """At the end of the test none of its processes and folders may remain."""
    with Desk(slurm) as desk:
        yield desk
        desk.check_nothing_left()


def variables_of(launcher: Launcher) -> dict[str, str]:
    """Return the variables by which mpi4py loads this launcher's MPI."""
    return {name: launcher.env[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")}


def assert_worked(ended: Ended, workers: int, code: int = 0) -> None:
    assert ended.code == code, str(ended)
    assert f"workers {workers} result 3" in ended.out, str(ended)
    assert not ended.errors, str(ended)
    assert "Traceback" not in ended.err, str(ended)


# Ways to launch


@pytest.mark.parametrize(
    ("options", "n", "mpi"),
    [
        # three tasks on the first node and one on the second: 3,1 in SLURM's variables
        ("-N2 -m plane=3", 4, None),
        ("-N2 --mpi=pmi2", 2, mpich_launcher),
        # Open MPI's library would find itself alone in each rank, so it is not asked
        pytest.param("-N2 --mpi=pmi2", 2, openmpi_launcher, marks=pytest.mark.long),
    ],
)
def test_srun_on_several_nodes(desk: Desk, options: str, n: int, mpi):
    # With its UCX, MPICH 5.0.2 often sends SLURM 22.05's pmi2 a value that it does not understand
    env = {**variables_of(mpi()), "MPIR_CVAR_CH4_NETMOD": "ofi"} if mpi else {}
    assert_worked(desk.srun(options, "count.py", "7", n=n, env=env).end(30), n, code=7)


@pytest.mark.long
def test_the_memory_limit_is_the_job_s_shared_among_the_ranks(desk: Desk):
    ended = desk.srun("-N1 --mem=2G", "count.py").end(30)
    assert_worked(ended, 2)
    limits = [int(limit) for limit in ended.out.partition("limits ")[2].split("\n")[0].split()]
    assert len(limits) == 2
    assert all(0.9 * 2**30 <= limit <= 2**30 for limit in limits), limits
    assert "WARNING" not in ended.err


@pytest.mark.long
def test_two_steps_of_one_job_do_not_meet_one_another(desk: Desk):
    srun = f"srun -N2 -n2 --overlap --mem=0 {RUN} count.py > "
    job, output = desk.sbatch("-N2", "-n2", script=f"{srun} one 2>&1 & {srun} two 2>&1 & wait")
    assert desk.end_of_job(job) == 0, output.read_text()
    for name in ("one", "two"):
        assert "workers 2 result 3" in (desk.folder / name).read_text()


@pytest.mark.parametrize(
    ("mpi", "options", "shape", "workers"),
    [
        (openmpi_launcher, "-x HOME -x TMPDIR -n 2", "-N1 -n2", "workers 2 "),
        # it starts its ranks by srun, whose own variables count the daemons
        pytest.param(
            *(mpich_launcher, "-n 3 -ppn 2", "-N2 --ntasks-per-node=2", "workers 3 "),
            marks=pytest.mark.long,
        ),
        # the batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and is no rank of srun's
        pytest.param(None, "", "-N1 -n2", "workers ", marks=pytest.mark.long),
    ],
)
def test_a_batch_script_without_srun(desk: Desk, mpi, options: str, shape: str, workers: str):
    launcher = mpi() if mpi else None
    known = variables_of(launcher) if launcher else {}
    lines = [f"export {name}={value}" for name, value in known.items()]
    lines.append(f"exec {' '.join(launcher.prefix) if launcher else ''} {options} {RUN} count.py 5")
    job, output = desk.sbatch(*shape.split(), script="\n".join(lines))
    assert desk.end_of_job(job) == 5, output.read_text()
    assert workers in output.read_text()
    assert " result 3" in output.read_text()
    assert "hpcdask: error: " not in output.read_text()


# Exit codes and ends


def test_a_program_killed_by_a_signal(desk: Desk):
    ended = desk.srun("-N2", "ends.py", "SIGKILL").end(30)
    assert ended.code == 128 + signal.SIGKILL, str(ended)


@pytest.mark.parametrize(
    ("nodes", "index", "options"),
    [("-N2", 1, ["--workers-min", "2"]), pytest.param("-N1", 0, [], marks=pytest.mark.long)],
)
def test_a_killed_rank_ends_the_run(desk: Desk, nodes: str, index: int, options: list[str]):
    run = desk.srun(f"{nodes} --mem=2G", *options, "waits.py")
    run.line("ready")
    desk.rank(index).kill()
    ended = run.end()
    assert ended.code != 0
    (error,) = ended.errors
    assert f"rank {index} on {HOST}" in error
    desk.check_nothing_left()


def test_a_killed_rank_with_enough_workers_left(desk: Desk):
    (desk.folder / "compute.py").write_text(COMPUTE)
    wrapper = 'if [ $SLURM_PROCID = 0 ]; then "$@"; echo "rank 0: $?"; else exec "$@"; fi'
    runner = ["sh", "-c", wrapper, "sh", "python", "-m", "hpcdask.run"]
    run = desk.srun("-N2 --mem=2G", "--workers-min", "1", "compute.py", runner=runner)
    run.line("running")
    desk.rank(1).kill()
    ended = run.end(40)
    assert f"sum {sum(range(40))}\nworkers 1\n" in ended.out, str(ended)
    assert "rank 0: 0\n" in ended.out, str(ended)  # srun itself returns that a task was killed
    assert f"rank 1 on {HOST} is gone: it was killed or its node failed. The run" in ended.err
    assert not ended.errors


@pytest.mark.long
def test_a_run_that_ends_does_not_go_on(desk: Desk):
    """Regression: "The run ends", and "the run goes on" for the rank that was lost next."""
    run = desk.srun("-N2 --mem=2G", "--workers-min", "1", "waits.py", "ignore")
    os.kill(json.loads(run.line("ready"))["scheduler"], signal.SIGKILL)
    assert "The run ends" in run.line("hpcdask: error: ", stream="err")
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # it may have ended
        desk.rank(1).kill()
    ended = run.end(40)
    assert ended.code != 0
    assert "goes on" not in ended.err, str(ended)
    assert len(ended.errors) == 1, str(ended)


@pytest.mark.long
def test_what_a_cancelled_step_leaves_is_swept_by_the_next_run(desk: Desk):
    """SLURM kills all of a step's processes at once, the janitors too."""
    run = desk.srun("-N2", "waits.py")
    run.line("ready")
    (name,) = desk.slurm.run("squeue", "-h", "-s", "-o", "%i").stdout.split()
    desk.slurm.run("scancel", name)
    ended = run.end()
    assert ended.code != 0
    assert "Traceback" not in ended.err
    wait_for(lambda: not desk.processes(), 5, "the processes to end")
    assert_worked(desk.srun("-N1", "count.py").end(30), 2)


def test_the_file_and_keys_of_a_cancelled_job_go_with_it(desk: Desk):
    file = desk.folder / "cluster.json"
    job, output = desk.sbatch("-N2", "-n2", script=f"srun {RUN} --scheduler-file {file}")
    wait_for(file.exists, 20, "the scheduler file")
    assert Path(f"{file}.keys").is_file()
    desk.slurm.run("scancel", str(job))
    desk.slurm.wait_for_state(job, "CANCELLED")
    desk.check_nothing_left()
    assert not file.exists(), output.read_text()


@pytest.mark.long
def test_a_job_that_is_killed_at_once_leaves_nothing(desk: Desk):
    job, output = desk.sbatch("-N2", "-n2", script=f"srun {RUN} {PROGRAMS}/waits.py")
    wait_for(lambda: output.exists() and "ready" in output.read_text(), 20, "the program")
    desk.slurm.run("scancel", "--signal=KILL", "--full", str(job))
    over = ("RUNNING", "COMPLETING")
    wait_for(lambda: desk.slurm.state(job) not in over, 20, "the job's end")
    desk.check_nothing_left()


def test_a_requeued_job_meets_again(desk: Desk):
    (desk.folder / "lives.py").write_text(
        "import os, time\n"
        "from distributed import Client\n"
        "life = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "print('life', life, 'workers', len(Client().nthreads()), flush=True)\n"
        "time.sleep(600 if life == '0' else 0)\n"
    )
    options = ("-N2", "-n2", "--requeue", "--open-mode=append")
    job, output = desk.sbatch(*options, script=f"srun {RUN} lives.py")
    wait_for(lambda: output.exists() and "life 0 workers 2" in output.read_text(), 20, "life 0")
    desk.slurm.run("scontrol", "requeue", str(job))
    wait_for(lambda: "life 1" in output.read_text(), 60, "life 1")
    assert desk.end_of_job(job) == 0, output.read_text()
    assert "life 1 workers 2\n" in output.read_text()
    assert "hpcdask: error: " not in output.read_text()


# Bad input


def test_a_bad_value_is_told_once(desk: Desk):
    ended = desk.srun("-N2", "--memory-limit", "lots", "count.py").end(30)
    assert (ended.code, ended.out) == (2, ""), str(ended)
    (error,) = ended.errors
    assert "'lots'" in error


@pytest.mark.long
@pytest.mark.usefixtures("slurm_programs")
def test_a_rank_that_never_arrives_is_named():
    """Regression: rank 0 left the end of the step to a process that SLURM killed with it.

    SLURM finds orphans by process groups here: by cgroups it does, by parents it does not. Its
    controller takes its time.
    """
    wrapper = 'if [ $SLURM_PROCID = 2 ]; then exec sleep 600; fi; exec "$@"'
    runner = ["sh", "-c", wrapper, "sh", "python", "-m", "hpcdask.run"]
    limit = stretched(4)
    conf = {"ProctrackType": "proctrack/pgid"}
    with SlurmSite(nodes=2, conf=conf) as slurm, Desk(slurm) as desk:
        slow = desk.folder / "scancel"
        slow.write_text(f'#!/bin/sh\nsleep 1\nexec {shutil.which("scancel")} "$@"\n')
        slow.chmod(0o700)
        path = {"PATH": f"{desk.folder}:{os.environ['PATH']}"}
        options = "--timeout", f"{limit}s", "count.py"
        run = desk.srun("-N2", *options, n=3, runner=runner, env=path)
        ended = run.end(60)
        desk.check_nothing_left()
    assert ended.code in (137, 143), str(ended)
    (error,) = ended.errors
    for word in ("rank 2 of 3", f"within {limit} s", f"2 on {HOST}", "--timeout"):
        assert word in error
    assert not ended.out


def test_a_rank_that_waits_for_one_that_failed_leaves_nothing(desk: Desk):
    """Regression: srun would wait for it, and its janitor was killed with the step."""
    wrapper = """
        if [ $SLURM_PROCID = 0 ]; then
            until ls -d "$TMPDIR"/hpcdask-*; do sleep 0.1; done >/dev/null 2>&1
            export DASK_DISTRIBUTED__SCHEDULER__PRELOAD=no.such.module
        fi
        exec "$@"
    """
    runner = ["sh", "-c", wrapper, "sh", "python", "-m", "hpcdask.run"]
    ended = desk.srun("-N2", "--interface", "lo", "count.py", n=2, runner=runner).end(60)
    assert ended.code, str(ended)
    assert any("the scheduler did not start" in error for error in ended.errors), str(ended)


# hpcdask doctor

DOCTOR = (sys.executable, "-m", "hpcdask", "doctor", "--json")


@pytest.mark.long
def test_the_doctor_reports_once_for_all_nodes(slurm: SlurmSite):
    done = slurm.run("srun", "-N2", "-n4", *DOCTOR, check=False, timeout=60)
    made = json.loads(done.stdout)
    assert done.returncode == made["exit_code"], done.stderr
    assert made["ranks"] == 4
    assert [node["ranks"] for node in made["nodes"]] == [[0, 1, 2, 3]]  # one host, by its name
    assert "SLURM" in done.stdout
    assert "hpcdask: error: " not in done.stderr
