"""The runner under a real SLURM of several nodes: srun, sbatch, scancel, requeue."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from clock import PATIENCE, clock, stretched
from hpcdask.runner.rendezvous import Rendezvous, RendezvousInfo
from hpcdask.security.credentials import create_credentials
from launching import (
    Result,
    describe,
    end,
    leftovers,
    made_by_hpcdask,
    mpich_launcher,
    name_of,
    openmpi_launcher,
    wait_for,
    what_stays,
)
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm

HOST = socket.gethostname()  # of every virtual node
RUN = (sys.executable, "-m", "hpcdask.run", "--device", "cpu")

COUNT = f"""
import sys
sys.path.append({str(Path(__file__).parents[1])!r})
from clock import clock
from distributed import Client
with Client() as client:
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    print("workers", len(workers), "result", client.submit(sum, [1, 2]).result(), flush=True)
    print("limits", *(worker["memory_limit"] for worker in workers.values()), flush=True)
    print("ended", clock(), flush=True)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
WAIT = """
import time
from distributed import Client
with Client() as client:
    client.submit(sum, [1, 2]).result()
    print("running", flush=True)
    time.sleep(600)
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


class Step:
    """A command of the site's user that runs on; its output is in files."""

    def __init__(self, desk: Desk, command: list[str], env: Mapping[str, str]) -> None:
        self.desk = desk
        self.out = desk.folder / f"{uuid.uuid4().hex}.out"
        self.err = self.out.with_suffix(".err")
        self.started = clock()
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, env=env, cwd=desk.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def wait_for(self, text: str, timeout: float = 30) -> None:
        """Wait until this text was printed."""

        def printed() -> bool:
            over = self.process.poll() is not None
            if text in self.out.read_text() + self.err.read_text():
                return True
            assert not over, f"over without {text!r}\n{self.show()}"
            return False

        wait_for(printed, timeout, f"{text!r}")

    def end(self, timeout: float = 30) -> Result:
        """Wait for the end."""
        try:
            code = self.process.wait(PATIENCE * timeout)
        except subprocess.TimeoutExpired:
            running = describe(self.desk.processes())
            pytest.fail(
                f"not over after {PATIENCE * timeout:g} s\n--- running\n{running}\n{self.show()}"
            )
        seconds = clock() - self.started
        return Result(code, self.out.read_text(), self.err.read_text(), seconds)

    def show(self) -> str:
        return f"--- stdout\n{self.out.read_text()}\n--- stderr\n{self.err.read_text()}"

    def rank(self, index: int) -> psutil.Process:
        """The process of a rank: a child of SLURM's own."""
        (found,) = [
            process
            for process in self.desk.processes()
            if process.environ().get("SLURM_PROCID") == str(index)
            and process.parent().name().startswith("slurmstepd")
        ]
        return found


class Desk:
    """A test's own folders at the site, and the variable that marks its processes."""

    def __init__(self, site: SlurmSite) -> None:
        self.site = site
        # On several nodes the ranks meet in HOME; sockets' paths must be short
        self.folder = Path(tempfile.mkdtemp(prefix="hd-", dir="/tmp"))
        self.home = self.folder / "home"
        self.tmp = self.folder / "tmp"
        self.home.mkdir()
        self.tmp.mkdir()
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        name, value = self.marker.split("=")
        folders = {"HOME": str(self.home), "TMPDIR": str(self.tmp)}
        self.env = {**site.env, **folders, name: value}

    def write(self, text: str, name: str = "program.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def start(self, *command: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> Step:
        return Step(self, [os.fspath(part) for part in command], {**self.env, **(env or {})})

    def srun(self, *command: str | os.PathLike[str], env: Mapping[str, str] | None = None) -> Step:
        return self.start("srun", *command, env=env)

    def sbatch(self, *options: str, script: str) -> tuple[int, Path]:
        """Submit a script; return the job's id and the file of all it prints."""
        output = self.folder / f"{uuid.uuid4().hex}.out"
        path = self.write(f"#!/bin/sh\n{script}\n", "job.sh")
        arguments = ("--output", output, "--chdir", self.folder, *options, path)
        return self.site.submit(*arguments, env=self.env), output

    def end_of_job(self, job: int, timeout: float = 40) -> int:
        """Wait for the job's end, and return its exit code."""
        self.site.wait_for_state(job, "COMPLETED", "FAILED", timeout=timeout)
        shown = self.site.run("scontrol", "show", "job", str(job)).stdout
        return int(shown.partition("ExitCode=")[2].partition(":")[0])

    def processes(self) -> list[psutil.Process]:
        others = ("", "srun", "slurmstepd")
        return [p for p in leftovers(self.marker) if name_of(p) not in others]

    def remains(self) -> list[str]:
        """Processes and folders that are left, but for the one that Open MPI leaves under srun."""
        named = set(made_by_hpcdask(self.folder))
        named |= {path for path in self.tmp.iterdir() if not path.name.startswith("ompi.")}
        return [*(describe([p]) for p in self.processes()), *map(str, sorted(named))]

    def assert_nothing_left(self, within: float = 5) -> None:
        if left := what_stays(self.remains, within):
            pytest.fail("left behind:\n" + "\n".join(left))


@pytest.fixture
def desk(slurm: SlurmSite) -> Iterator[Desk]:
    """At the end of the test none of its processes and folders may remain."""
    desk = Desk(slurm)
    try:
        yield desk
        desk.assert_nothing_left()
    finally:
        end(leftovers(desk.marker))
        shutil.rmtree(desk.folder, ignore_errors=True)


def errors(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("hpcdask: error: ")]


def assert_worked(result: Result, workers: int, code: int = 0) -> None:
    shown = f"{result.code} after {result.seconds:.1f} s\n{result.out}\n{result.err}"
    assert result.code == code, shown
    assert f"workers {workers} result 3" in result.out, shown
    assert not errors(result.err), shown
    assert "Traceback" not in result.err, shown


def assert_refused(result: Result, *words: str, within: float = 15) -> None:
    shown = f"{result.code} after {result.seconds:.1f} s\n{result.out}\n{result.err}"
    assert result.code == 2, shown
    assert len(errors(result.err)) == 1, shown
    missing = [word for word in words if word not in errors(result.err)[0]]
    assert not missing, f"{missing} not in: {errors(result.err)[0]}"
    assert "Traceback" not in result.err, shown
    assert not result.out, shown
    assert result.seconds < within, shown


# --- ways to launch -------------------------------------------------------------------------------


@pytest.mark.long
def test_srun_on_one_node(desk):
    """The memory limit is the job's, shared among the ranks."""
    result = desk.srun("-N1", "-n2", "--mem=2G", *RUN, desk.write(COUNT)).end()
    assert_worked(result, 2)
    ended = float(result.out.partition("ended ")[2].split()[0])
    assert clock() - ended < 3
    limits = [int(limit) for limit in result.out.partition("limits ")[2].split("\n")[0].split()]
    assert len(limits) == 2
    assert all(0.9 * 2**30 <= limit <= 2**30 for limit in limits), limits
    assert "WARNING" not in result.err


def test_srun_on_several_nodes_without_an_mpi_plugin(desk):
    """Three tasks on the first node and one on the second: 3,1 in SLURM's variables."""
    result = desk.srun("-N2", "-n4", "-m", "plane=3", *RUN, desk.write(COUNT), "7").end()
    assert_worked(result, 4, code=7)


def test_srun_with_pmi2_and_mpich(desk):
    env = {n: mpich_launcher().env[n] for n in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")}
    # With its UCX, MPICH 5.0.2 often sends SLURM 22.05's pmi2 a value that it does not understand
    env["MPIR_CVAR_CH4_NETMOD"] = "ofi"
    result = desk.srun("--mpi=pmi2", "-N2", "-n2", *RUN, desk.write(COUNT), env=env).end()
    assert_worked(result, 2)


@pytest.mark.long
def test_two_steps_of_one_job_at_once(desk):
    """They share the job's id, and must not meet one another."""
    srun = f"srun -N2 -n2 --overlap --mem=0 {' '.join(RUN)} {desk.write(COUNT)} > "
    script = f"{srun} one 2>&1 & {srun} two 2>&1 & wait"
    job, output = desk.sbatch("-N2", "-n2", script=script)
    assert desk.end_of_job(job) == 0, output.read_text()
    for name in ("one", "two"):
        assert "workers 2 result 3" in (desk.folder / name).read_text()


def test_mpirun_in_a_batch_script(desk):
    mpi = openmpi_launcher()
    options = "-x HOME -x TMPDIR"
    command = f"{' '.join(mpi.prefix)} {options} -n 2 {' '.join(RUN)} {desk.write(COUNT)} 5"
    variables = "".join(f"export {n}={mpi.env[n]}\n" for n in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH"))
    job, output = desk.sbatch("-N1", "-n2", script=f"{variables}exec {command}")
    assert desk.end_of_job(job) == 5, output.read_text()
    assert "workers 2 result 3" in output.read_text()
    assert not errors(output.read_text())


@pytest.mark.long
def test_mpich_s_launcher_in_a_batch_script_of_two_nodes(desk):
    """It starts its ranks by srun, whose own variables count the daemons."""
    mpi = mpich_launcher()
    command = f"{' '.join(mpi.prefix)} -n 3 -ppn 2 {' '.join(RUN)} {desk.write(COUNT)}"
    variables = "".join(f"export {n}={mpi.env[n]}\n" for n in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH"))
    job, output = desk.sbatch("-N2", "--ntasks-per-node=2", script=f"{variables}exec {command}")
    assert desk.end_of_job(job) == 0, output.read_text()
    assert "workers 3 result 3" in output.read_text()


@pytest.mark.long
def test_no_launcher_in_a_batch_script(desk):
    """The batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and is no rank of srun's."""
    command = f"{' '.join(RUN)} {desk.write(COUNT)} 6"
    job, output = desk.sbatch("-N1", "-n2", script=f"exec {command}")
    assert desk.end_of_job(job) == 6, output.read_text()
    assert "result 3" in output.read_text()
    assert not errors(output.read_text())


# --- exit codes and ends --------------------------------------------------------------------------


def test_program_killed_by_a_signal(desk):
    program = desk.write("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert desk.srun("-N2", "-n2", *RUN, program).end().code == 128 + signal.SIGSEGV


def test_program_that_raises(desk):
    result = desk.srun("-N2", "-n2", *RUN, desk.write("raise ValueError('mine')")).end()
    assert result.code == 1
    lines = [line for line in result.err.splitlines() if not line.startswith("srun: error: ")]
    assert lines[-1] == "ValueError: mine"
    assert result.err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("nodes", "index", "options"), [("-N2", 1, ["--workers-min", "2"]), ("-N1", 0, [])]
)
def test_rank_killed(desk, index, options, nodes):
    step = desk.srun(nodes, "-n2", "--mem=2G", *RUN, *options, desk.write(WAIT))
    step.wait_for("running")
    killed = clock()
    step.rank(index).kill()
    result = step.end(10)
    assert clock() - killed < 10
    assert result.code != 0
    assert len(errors(result.err)) == 1, result.err
    assert f"rank {index} on {HOST}" in errors(result.err)[0]
    desk.assert_nothing_left(within=max(0, killed + 10 - clock()))


def test_rank_killed_with_enough_workers_left(desk):
    wrapper = 'if [ $SLURM_PROCID = 0 ]; then "$@"; echo "rank 0: $?"; else exec "$@"; fi'
    options = ("--workers-min", "1", desk.write(COMPUTE))
    step = desk.srun("-N2", "-n2", "--mem=2G", "sh", "-c", wrapper, "sh", *RUN, *options)
    step.wait_for("running")
    step.rank(1).kill()
    result = step.end(40)
    assert f"sum {sum(range(40))}\nworkers 1\n" in result.out, result.err
    assert "rank 0: 0\n" in result.out, result.err  # srun itself returns that a task was killed
    assert f"rank 1 on {HOST} is gone: it was killed or its node failed. The run" in result.err
    assert not errors(result.err)


STUBBORN = """
import os, signal, time
from distributed import Client

client = Client()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("scheduler", client.run_on_scheduler(os.getpid), flush=True)
time.sleep(600)
"""


def test_a_run_that_ends_does_not_go_on(desk):
    """Regression: "The run ends", and "the run goes on" for the rank that was lost next."""
    step = desk.srun("-N2", "-n2", "--mem=2G", *RUN, "--workers-min", "1", desk.write(STUBBORN))
    step.wait_for("scheduler ")
    pid = int(step.out.read_text().partition("scheduler ")[2].split()[0])
    os.kill(pid, signal.SIGKILL)
    step.wait_for("The run ends")
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):  # it may have ended
        step.rank(1).kill()
    result = step.end(40)
    assert result.code != 0
    assert "goes on" not in result.err, result.err
    assert len(errors(result.err)) == 1, result.err


def test_step_cancelled(desk, slurm):
    """SLURM kills all of a step's processes at once, the janitors too: the next run sweeps."""
    step = desk.srun("-N2", "-n2", *RUN, desk.write(WAIT))
    step.wait_for("running")
    (name,) = slurm.run("squeue", "-h", "-s", "-o", "%i").stdout.split()
    slurm.run("scancel", name)
    result = step.end(20)
    assert result.code != 0
    assert "Traceback" not in result.err
    wait_for(lambda: not desk.processes(), 5, "the processes to end")
    assert_worked(desk.srun("-N1", "-n2", *RUN, desk.write(COUNT)).end(), 2)
    desk.assert_nothing_left()


def test_job_cancelled(desk, slurm):
    """A cluster without a program: its file and keys go with it."""
    file = desk.folder / "cluster.json"
    command = f"srun -N2 -n2 {' '.join(RUN)} --scheduler-file {file}"
    job, output = desk.sbatch("-N2", "-n2", script=command)
    wait_for(file.exists, 20, "the scheduler file")
    assert Path(f"{file}.keys").is_dir()
    slurm.run("scancel", str(job))
    slurm.wait_for_state(job, "CANCELLED")
    desk.assert_nothing_left(within=10)
    assert not file.exists(), output.read_text()
    assert not Path(f"{file}.keys").exists()


def test_job_killed_at_once(desk, slurm):
    """SIGKILL to every process of the job, without a warning."""
    job, output = desk.sbatch("-N2", "-n2", script=f"srun {' '.join(RUN)} {desk.write(WAIT)}")
    wait_for(lambda: output.exists() and "running" in output.read_text(), 20, "the program")
    slurm.run("scancel", "--signal=KILL", "--full", str(job))
    wait_for(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"), 20, "the job's end")
    desk.assert_nothing_left(within=10)


def test_requeued_job(desk, slurm, monkeypatch):
    """Notes that lie where the second life looks, with a dead address, do not lead it astray."""
    program = desk.write(
        "import os, time\n"
        "from distributed import Client\n"
        "client = Client()\n"
        "life = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
        "workers = client.sync(client.scheduler.identity, n_workers=-1)['workers']\n"
        "print('life', life, 'workers', len(workers), flush=True)\n"
        "time.sleep(600 if life == '0' else 0)\n"
    )
    script = f"srun -N2 -n2 {' '.join(RUN)} {program}"
    options = ("-N2", "-n2", "--requeue", "--open-mode=append")
    job, output = desk.sbatch(*options, script=script)
    wait_for(lambda: output.exists() and "life 0 workers 2" in output.read_text(), 20, "life 0")
    monkeypatch.setenv("HOME", str(desk.home))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    info = RendezvousInfo("127.0.0.1", port, HOST, "0", create_credentials())
    first, second = (Rendezvous(f"srun-step0-{job}.r{n}", shared=True) for n in (0, 1))
    slurm.run("scontrol", "requeue", str(job))
    first.publish(info)
    second.publish(info)
    wait_for(lambda: "life 1" in output.read_text(), 60, "life 1")
    assert desk.end_of_job(job) == 0, output.read_text()
    assert "life 1 workers 2\n" in output.read_text()
    assert not errors(output.read_text())
    assert not Path(second.folder).exists()
    first.close()


# --- bad input ------------------------------------------------------------------------------------


def test_no_gpu_in_a_job(desk):
    command = (*RUN[:3], desk.write(COUNT))
    result = desk.srun("-N2", "-n2", *command, env={"CUDA_VISIBLE_DEVICES": ""}).end()
    assert_refused(result, HOST, "--gpus-per-node=1", "--gres=gpu:1", "--gpus-per-task=1")


def test_script_that_does_not_exist(desk):
    assert_refused(desk.srun("-N2", "-n2", *RUN, "nowhere.py").end(), "nowhere.py", "shared")


@pytest.mark.long
def test_an_mpi_that_is_not_the_plugin_s_is_not_asked(desk):
    """With pmi2, Open MPI's library would find itself alone in each rank."""
    env = {n: openmpi_launcher().env[n] for n in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")}
    step = desk.srun("--mpi=pmi2", "-N2", "-n2", *RUN, desk.write(COUNT), env=env)
    result = step.end()
    assert (result.code, result.out.splitlines()[0]) == (0, "workers 2 result 3"), result


@pytest.mark.long
def test_rank_that_never_arrives(desk):
    wrapper = 'if [ $SLURM_PROCID = 2 ]; then exec sleep 600; fi; exec "$@"'
    limit = stretched(4)
    options = ("--timeout", f"{limit}s", desk.write(COUNT))
    step = desk.srun("-N2", "-n3", "sh", "-c", wrapper, "sh", *RUN, *options)
    result = step.end(30)
    assert result.code in (137, 143), result
    assert len(errors(result.err)) == 1, result.err
    for word in ("rank 2 of 3", f"within {limit} s", f"2 on {HOST}", "--timeout"):
        assert word in errors(result.err)[0]
    assert not result.out


def test_bad_value_of_an_option(desk):
    result = desk.srun("-N2", "-n2", *RUN, "--memory-limit", "lots", desk.write(COUNT)).end(30)
    assert_refused(result, "--memory-limit", "'lots'")


@pytest.mark.long
def test_rank_0_that_never_arrives(desk):
    wrapper = 'if [ $SLURM_PROCID = 0 ]; then exec sleep 600; fi; exec "$@"'
    limit = stretched(4)
    options = ("--timeout", f"{limit}s", desk.write(COUNT))
    step = desk.srun("-N2", "-n2", "sh", "-c", wrapper, "sh", *RUN, *options)
    result = step.end(30)
    assert result.code in (137, 143), result
    assert "rank 1 of 2" in errors(result.err)[0]


# hpcdask doctor


def test_the_doctor_reports_once_for_all_nodes(desk):
    step = desk.srun("-N2", "-n4", sys.executable, "-m", "hpcdask.cli", "doctor", "--json")
    result = step.end(60)
    made = json.loads(result.out)
    assert result.code == made["exit_code"], result.err
    assert made["ranks"] == 4
    assert [node["ranks"] for node in made["nodes"]] == [[0, 1, 2, 3]]  # one host, by its name
    assert "SLURM" in result.out
    assert not errors(result.err)


@pytest.mark.parametrize(("partition", "status"), [("nowhere", "warning"), ("gpu", "ok")])
def test_the_doctor_asks_for_the_partitions(slurm, partition, status):
    doctor = (sys.executable, "-m", "hpcdask.cli", "doctor", "--json")
    env = {"DASK_JOBQUEUE__SLURM__QUEUE": partition}
    (node,) = json.loads(slurm.run(*doctor, env=env, check=False, timeout=60).stdout)["nodes"]
    found = [one for one in node["findings"] if one["group"] == "configuration"]
    assert found[-1]["status"] == status, found
    said = any("the queueing system has no nowhere" in one["value"] for one in found)
    assert said is (status == "warning")
