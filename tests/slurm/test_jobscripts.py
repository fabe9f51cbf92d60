"""The scripts of jobscripts/, as users submit them, on a smaller allocation than they ask for."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdask
from launching import Launcher, made_by_hpcdask, openmpi_launcher, wait_for, walk
from running import Site
from slurm_site import SlurmSite

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SCRIPTS = Path(__file__).parents[2] / "jobscripts"
#: What sbatch's options make of a script's own.
SMALL = ("--nodes=1", "--gres=gpu:2", "--cpus-per-task=1")
TWO_RANKS = (*SMALL, "--ntasks-per-node=2")
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
PROGRAM = """
import os, sys
from distributed import Client
with Client() as client:
    workers = client.nthreads()
    total = client.submit(sum, [1, 2]).result()
    print("workers", len(workers), "sum", total, "words", sys.argv[1:], flush=True)
"""
#: Its first life waits for the second one.
RESTARTED = """
import os, time
from distributed import Client
life = os.environ.get("SLURM_RESTART_COUNT", "0")
with Client() as client:
    print("life", life, "sum", client.submit(sum, [1, 2]).result(), flush=True)
    time.sleep(600 if life == "0" else 0)
"""


class Folder(Site):
    """Where a user submits from; jobs leave their output there."""

    def __init__(self, slurm: SlurmSite) -> None:
        super().__init__(Launcher("sbatch", [], {}))
        self.slurm = slurm
        (self.folder / "script.py").write_text(PROGRAM)
        (self.folder / "restarted.py").write_text(RESTARTED)
        mpi = openmpi_launcher()
        self.env |= {
            **self.launcher.env,
            "HPCDASK_OPTIONS": "--device cpu",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            **{name: mpi.env[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")},
        }

    def submit(self, *arguments: str | Path) -> int:
        """Submit with sbatch's options, a script and its arguments; return the job's id."""
        return self.slurm.submit(*arguments, env=self.env, cwd=self.folder)

    def output(self, job: int) -> str:
        """What the job has printed, in the file where SLURM puts it by default."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"slurm-{job}*.out")))

    def state(self, job: int) -> str:
        """One word for the job, or for all elements of an array."""
        words = set(self.slurm.state(job).split())
        return words.pop() if len(words) == 1 else "several"

    def wait(self, job: int, state: str, timeout: float = 120) -> str:
        """Wait for the end of the job, which must be in this state; return its output."""
        try:
            wait_for(lambda: self.state(job) in ENDS, timeout, f"job {job}", interval=0.2)
        except AssertionError as error:
            pytest.fail(f"{error}: {self.state(job)}\n{self.output(job)}")
        output = self.output(job)
        assert self.state(job) == state, output
        assert "hpcdask: error" not in output
        assert "Traceback" not in output
        return output

    def files(self) -> list[str]:
        """Return keys, and what runs have left; clusters keep their folders in HOME."""
        keys = [path for path in walk(self.folder) if path.name.endswith("keys")]
        return [str(path) for path in (*keys, *made_by_hpcdask(self.tmp))]


@pytest.fixture(scope="module")
def folder(slurm_programs: None) -> Iterator[Folder]:
    """At the end, no process of its jobs and no key may remain."""
    with SlurmSite(nodes=8, gpus_per_node=2, requeue_wait_s=5) as slurm, Folder(slurm) as folder:
        yield folder
        folder.check_nothing_left()
        assert not list(folder.folder.glob("*json*"))


def test_all_that_slurm_can_run(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    """Two ranks each, side by side; only sbatch's options make them smaller than they are."""
    monkeypatch.chdir(folder.folder)
    program = ("script.py", "a b", "it's")
    requeued = folder.submit(
        *SMALL, "--ntasks-per-node=1", SCRIPTS / "slurm-requeue.sh", "restarted.py"
    )
    file = folder.submit(*TWO_RANKS, SCRIPTS / "slurm-scheduler-file.sh", "cluster.json")
    jobs = {
        "slurm-srun.sh": folder.submit(
            *SMALL, "--nodes=2", "--ntasks-per-node=1", SCRIPTS / "slurm-srun.sh", *program
        ),
        "slurm-mpirun.sh": folder.submit(
            *SMALL, "--ntasks=2", SCRIPTS / "slurm-mpirun.sh", *program
        ),
    }
    wait_for(lambda: "life 0 sum 3" in folder.output(requeued), 60, "the first life", interval=0.2)
    folder.slurm.run("scontrol", "requeue", str(requeued))

    wait_for(Path("cluster.json").exists, 60, "the scheduler file", interval=0.2)
    with hpcdask.connect("cluster.json") as client:
        client.wait_for_workers(2, timeout=180)
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3
        client.shutdown()

    whole = ("--nodes=1", "--gres=gpu:2", "--job-name=whole")
    jobs["slurm-whole-nodes.sh"] = folder.submit(*whole, SCRIPTS / "slurm-whole-nodes.sh", *program)
    nothing = folder.submit(*SMALL, "--array=0", SCRIPTS / "slurm-array.sh")
    array = folder.submit(*SMALL, "--array=0-1%2", SCRIPTS / "slurm-array.sh", *program)
    small = re.sub(
        'cores=8, memory="64GiB"',
        'cores=1, memory="500MB", device="cpu", gpus_per_job=1',
        (SCRIPTS / "slurm-job-per-gpu.sh").read_text(),
    ).replace("maximum=8", "maximum=1")
    (folder.folder / "small.sh").write_text(small)
    per_gpu = folder.submit("--cpus-per-task=1", "small.sh")

    for job in jobs.values():
        assert "workers 2 sum 3 words ['a b', \"it's\"]\n" in folder.wait(job, "COMPLETED")
    folder.wait(file, "COMPLETED")
    assert "name a program" in folder.wait(nothing, "FAILED")
    assert folder.wait(array, "COMPLETED").count(" sum 3 words ['a b', \"it's\"]\n") == 2
    assert f"the sum is {sum(n**2 for n in range(1000))}\n" in folder.wait(per_gpu, "COMPLETED")
    output = folder.wait(requeued, "COMPLETED")
    assert output.index("life 0 sum 3") < output.index("life 1 sum 3")
    assert not folder.slurm.run("squeue", "-h", "-t", "pending,running").stdout


RUN = ["python", "-m", "hpcdask.run"]
BENCH = ["-m", "hpcdask.bench", "array"]
#: Script, its arguments, stand-in for a launcher that is not here, and what that has to get.
STAND_INS = {
    "slurm-apptainer.sh": (
        ["my image.sif", "script.py", "a b"],
        "srun",
        ["-K", "apptainer", "exec", "--nv", "my image.sif", *RUN, "script.py", "a b"],
    ),
    "slurm-pyxis.sh": (
        ["my image.sqsh"],
        "srun",
        [
            *("-K", "--container-image=my image.sqsh", "--container-mount-home"),
            *("--container-mounts=FOLDER:FOLDER", "--container-workdir=FOLDER", *RUN, *BENCH),
        ],
    ),
    "pbs.sh": ([], "mpirun", ["-n", "8", *RUN, *BENCH]),
    "lsf-jsrun.sh": (
        [],
        "jsrun",
        [
            *("--nrs", "2", "--rs_per_host", "1", "--tasks_per_rs", "6", "--gpu_per_rs", "6"),
            *("--cpu_per_rs", "42", "--bind", "none", *RUN, *BENCH),
        ],
    ),
}


@pytest.mark.parametrize("script", STAND_INS)
def test_what_a_stand_in_for_the_launcher_gets(folder: Folder, tmp_path: Path, script: str):
    """Apptainer, Pyxis, PBS and jsrun are not here; SLURM's own part is checked by SLURM."""
    arguments, name, expected = STAND_INS[script]
    stand_in = tmp_path / name
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o700)
    done = subprocess.run(
        ["bash", SCRIPTS / script, *arguments],
        cwd=folder.folder,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout.splitlines() == [
        word.replace("FOLDER", str(folder.folder)) for word in expected
    ]
    if script.startswith("slurm"):
        small = ("--nodes=2", "--gres=gpu:2", "--ntasks-per-node=2", "--cpus-per-task=4")
        done = folder.slurm.run("sbatch", "--test-only", *small, SCRIPTS / script, *arguments)
        assert "to start at" in done.stderr


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_it_is_a_shell_script(script: Path):
    """One that is not tested in this file is found here."""
    assert script.name in Path(__file__).read_text()
    assert script.read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", script], check=True)
