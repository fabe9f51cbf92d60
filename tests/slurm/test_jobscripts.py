"""The scripts of jobscripts/ as users submit them: nothing in them is changed or overridden."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdask
from launching import describe, end, leftovers, openmpi_launcher, wait_for
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

SCRIPTS = Path(__file__).parents[2] / "jobscripts"


class Folder:
    """Where a user submits from; jobs leave their output there."""

    def __init__(self, site: SlurmSite) -> None:
        self.site = site
        # Short, for sockets; its TMPDIR and HOME show what is left behind
        self.path = Path(tempfile.mkdtemp(prefix="hj-", dir="/tmp"))
        self.tmp = self.path / "tmp"
        self.tmp.mkdir()
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        mpi = openmpi_launcher()
        self.env = {
            "HOME": str(self.path),
            "TMPDIR": str(self.tmp),
            "HPCDASK_TEST": self.marker.partition("=")[2],
            "HPCDASK_OPTIONS": "--device cpu",
            "MPIRUN_OPTIONS": "--oversubscribe --allow-run-as-root",
            **{name: mpi.env[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")},
        }

    def submit(self, script: str, *arguments: str) -> int:
        """Submit a script of jobscripts/ with its arguments; return the job's id."""
        return self.site.submit(SCRIPTS / script, *arguments, env=self.env, cwd=self.path)

    def output(self, job: int) -> str:
        """What the job has printed, in the file where SLURM puts it by default."""
        path = self.path / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, job: int, state: str, timeout: float = 120) -> str:
        """Wait for the end of the job, which must be in this state; return its output."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        try:
            ended = self.site.wait_for_state(job, *ends, timeout=timeout)
        except AssertionError as error:
            pytest.fail(f"{error}\n{self.output(job)}")
        assert ended == state, self.output(job)
        return self.output(job)

    def left(self) -> list[str]:
        """Processes, and files other than the jobs' output."""
        files = [*self.tmp.iterdir(), *self.path.glob("*json*"), *self.path.rglob("*.pem")]
        return [*describe(leftovers(self.marker)).splitlines(), *map(str, files)]


@pytest.fixture(scope="module")
def site(slurm_programs: None) -> Iterator[SlurmSite]:
    """A SLURM with nodes as large as the scripts ask for."""
    with SlurmSite(nodes=2, gpus_per_node=4, cpus_per_node=32) as site:
        yield site


@pytest.fixture
def folder(site: SlurmSite) -> Iterator[Folder]:
    """At the end of the test, no process of its jobs and no key may remain."""
    folder = Folder(site)
    try:
        yield folder
        try:
            wait_for(lambda: not folder.left(), 10)
        except AssertionError:
            pytest.fail("left behind:\n" + "\n".join(folder.left()))
    finally:
        site.cancel_all()
        end(leftovers(folder.marker))
        shutil.rmtree(folder.path, ignore_errors=True)


def record(output: str) -> dict:
    """The measurement that a workload prints as a line of JSON."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert len(lines) == 1, output
    return json.loads(lines[0])


@pytest.mark.parametrize(
    ("script", "workload", "workers"),
    [("slurm-srun.sh", "array", 8), ("slurm-mpirun.sh", "svd", 4)],
)
def test_a_program(folder: Folder, script: str, workload: str, workers: int):
    output = folder.wait(folder.submit(script, "20MB"), "COMPLETED")
    found = record(output)
    assert found["workload"] == workload
    assert found["devices"] == {"cpu": workers}
    assert 0 < found["bytes"] <= 20e6
    assert found["checks"]
    assert all(check["ok"] for check in found["checks"]), output
    assert "hpcdask: error" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize("how", ["shutdown", "scancel"])
def test_a_cluster_that_stays_up(folder: Folder, how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder.path)
    job = folder.submit("slurm-scheduler-file.sh", "cluster.json")

    def is_up() -> bool:
        assert folder.site.state(job) in ("PENDING", "RUNNING"), folder.output(job)
        return Path("cluster.json").exists()

    wait_for(is_up, 60, "the scheduler file", interval=0.2)
    with hpcdask.connect("cluster.json") as client:
        client.wait_for_workers(8, timeout=60)
        assert client.gather(client.map(lambda x: x + 1, range(8))) == list(range(1, 9))
        if how == "shutdown":
            client.shutdown()
    if how == "scancel":
        folder.site.run("scancel", str(job))
    output = folder.wait(job, {"shutdown": "COMPLETED", "scancel": "CANCELLED"}[how], timeout=60)
    assert "hpcdask: error" not in output
    assert "Traceback" not in output


def test_a_cluster_without_a_file(folder: Folder):
    output = folder.wait(folder.submit("slurm-scheduler-file.sh"), "FAILED")
    assert "name a file" in output


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_it_is_a_shell_script(script: Path):
    """One that is not tested above is found here."""
    assert script.name in Path(__file__).read_text()
    assert script.read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", script], check=True)
