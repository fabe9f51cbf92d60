"""``hpcdask submit`` without a queue: scripts word by word, refusals, waiting, the command line."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import dask
import pytest
from click.testing import CliRunner, Result

from hpcdask.cli import main
from hpcdask.errors import QueueError, UsageError
from hpcdask.jobs.logs import GrowingFile
from hpcdask.queues.job_state import JobState, QueueStatus
from hpcdask.queues.registry import queue_class
from hpcdask.queues.slurm import SlurmQueue
from hpcdask.submit import follow

SHAPE = ("-N", "2", "--gpus-per-node", "4", "-t", "1:00:00")
MORE = ("--mem", "64GiB", "-q", "gpu", "-A", "my account", "--prologue", "module load mpi")
ASKED = (*SHAPE, "--cpus-per-gpu", "8", *MORE)
DRY_RUN = ("submit", "--dry-run", "--system")
PROGRAM = ("my train.py", "--epochs", "10", "it's")
MPIRUN = """\
# each MPI has its own option for the ranks per node
case "$(mpirun --version 2>&1)" in
*"Open MPI"* | *OpenRTE* | *PRRTE*) per_node="--map-by ppr:4:node" ;;
*) per_node="-ppn 4" ;;
esac
exec mpirun -n 8 $per_node PYTHON -P -m hpcdask.run 'my train.py' --epochs 10 'it'"'"'s'
"""
RUN = "PYTHON -P -m hpcdask.run 'my train.py' --epochs 10 'it'\"'\"'s'\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with an odd name, and no queueing system."""
    folder = tmp_path / "my runs; 1"
    folder.mkdir()
    (folder / "my train.py").touch()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PWD", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PBS_ACCOUNT", raising=False)
    return folder


def hpcdask(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, list(words))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def script(system: str, *words: str) -> str:
    """The script, without what differs from run to run."""
    umask = os.umask(0o022)
    try:
        text = hpcdask(*DRY_RUN, system, *words).stdout
    finally:
        os.umask(umask)
    subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
    text = text.replace(os.getcwd(), "/ann/my runs; 1").replace(sys.executable, "PYTHON")
    return re.sub(r"submit-([\w]+)-[0-9a-f]{6}\b", r"submit-\1-ID", text)


def refused(*words: str) -> str:
    err = hpcdask(*words, code=2).stderr
    assert err.startswith("hpcdask: error: ")
    assert len(err.splitlines()) == 1
    return err


# Golden scripts. What each option means is checked in test_queue_scripts; here it is the shape of
# a whole allocation.


SLURM = """\
#!/usr/bin/env bash
#SBATCH -J "my train.py"
#SBATCH -p gpu
#SBATCH -A "my account"
#SBATCH --cpus-per-task=8
#SBATCH --mem=65536M
#SBATCH -t 1:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --gres=gpu:4
#SBATCH --comment=hpcdask:submit-my_train_py-ID
#SBATCH --output="/ann/my runs; 1/hpcdask-%j.log"

cd '/ann/my runs; 1' || exit
umask 0022
export PYTHONUNBUFFERED=1
unset SLURM_EXPORT_ENV
module load mpi
export SRUN_CPUS_PER_TASK=8
exec srun -K """


def test_the_whole_script():
    assert script("slurm", *ASKED, *PROGRAM) == SLURM + RUN


@pytest.mark.parametrize(
    ("system", "words", "lines"),
    [
        ("pbs", ASKED, ["-l select=2:ncpus=32:mpiprocs=4:mem=65536MB:ngpus=4", "-W umask=077"]),
        ("lsf", ASKED, ["-n 64", '-R "span[ptile=32]"', '-gpu "num=4"', "-W 1:00"]),
        ("sge", (*SHAPE, "--directive", "-pe mpi 64"), ["-pe mpi 64", "-l gpu=4", "-l h_rt=1:0"]),
        ("oar", SHAPE, ["-l /nodes=2/gpu=4,walltime=1:00:00"]),
        ("moab", ASKED, ["-l nodes=2:ppn=32:gpus=4,mem=131072MB"]),  # of all nodes together
    ],
)
def test_the_shape_in_words_of_other_systems(system: str, words: tuple[str, ...], lines: list[str]):
    """As in qsub(1B), bsub(1), sge_submit(1) and oarsub(1), whose nodes are reached by oarsh."""
    text, queue = script(system, *words, *PROGRAM), queue_class(system)
    for line in lines:
        assert f"\n{queue.prefix} {line}" in text
    assert f"exec >>'/ann/my runs; 1'/hpcdask-{queue.job_id}.log 2>&1\n" in text
    by_host = MPIRUN.partition("\n")[2].replace("$per", '--hostfile "$OAR_NODEFILE" $per')
    ends = {"pbs": f"\nexec mpirun -n 8 {RUN}", "oar": by_host}
    assert text.endswith(ends.get(system, MPIRUN))


# What is left to the site, and what the user writes instead


def test_what_is_not_asked_for_is_not_written():
    text = script("slurm", "train.py")
    assert "--mem" not in text
    assert "CPUS" not in text.upper()
    assert "\n#SBATCH --gres=gpu:1\n" in text
    assert "-M " not in script("lsf", "train.py")
    assert "mem=" not in script("pbs", "train.py")
    assert "gpu" not in script("slurm", "--gpus-per-node", "0", "train.py")


def test_directives_of_the_user():
    own = ("--directive", "#SBATCH --gpus-per-node=a100:4", "--directive", "--exclusive")
    text = script("slurm", "--gpus-per-node", "4", *own, "train.py")
    assert "gres" not in text
    assert "\n#SBATCH --gpus-per-node=a100:4\n#SBATCH --exclusive\n" in text
    assert "\n#SBATCH --ntasks-per-node=4\n" in text
    text = script(
        "pbs", "--gpus-per-node", "4", "--directive", "-l nodes=1:ppn=8:gpus=4", "train.py"
    )
    assert "select" not in text
    assert "\n#PBS -l nodes=1:ppn=8:gpus=4\n" in text
    assert "\n#PBS -l walltime=00:30:00\n" in text
    text = script("slurm", "--gpus-per-node", "2", "--directive", "--gres=nvme:100", "train.py")
    assert text.index("--gres=gpu:2,nvme:100\n") > text.index("--gres=nvme:100\n")
    for directive in ("--gres=shard:1", "--tres-per-node=gres/gpu:2", "--gpus=2"):
        assert "--gres=gpu" not in script("slurm", "--directive", directive, "train.py")


def test_what_is_configured_for_dask_jobqueue_counts_except_a_worker_s_gpus():
    configured = {
        "jobqueue.slurm.queue": "gpu",
        "jobqueue.slurm.cores": 3,
        "jobqueue.slurm.job-mem": "7G",
        "jobqueue.slurm.job-extra-directives": ["--gres=gpu:1", "--qos=high"],
        "jobqueue.slurm.job-script-prologue": ["module load site"],
        "jobqueue.slurm.log-directory": "/logs",
    }
    with dask.config.set(configured):
        text = script("slurm", "--prologue", "module load mine", "train.py")
    there = ["-p gpu", "--qos=high", "--output=/logs/hpcdask-%j.log"]
    assert all(f"\n#SBATCH {line}\n" in text for line in there)
    assert "\nmodule load site\nmodule load mine\n" in text
    assert "gpu:1\n#SBATCH --qos" not in text
    assert text.count("--gres") == 1
    assert "7G" not in text
    assert "cpus-per-task" not in text


def test_launchers_and_containers():
    image = "apptainer exec --nv 'my image.sif'"
    text = script("slurm", "--container", image, "--run", "--protocol ucx", "missing.py")
    assert text.endswith(
        f"exec srun -K {image} python -P -m hpcdask.run --protocol ucx missing.py\n"
    )
    text = script("slurm", "-N", "2", "--launcher", "mpirun", "-m", "hpcdask.bench", "array")
    assert text.endswith("exec mpirun -n 2 PYTHON -P -m hpcdask.run -m hpcdask.bench array\n")
    text = script("slurm", "--run", "--scheduler-file 'my cluster.json'")
    assert text.endswith("-m hpcdask.run --scheduler-file 'my cluster.json'\n")
    assert "-J dask-cluster\n" in text


def test_everything_from_the_program_on_is_the_program_s():
    text = script("pbs", "train.py", "--wait", "-N", "2", "--", "--system", "x")
    assert text.endswith("-m hpcdask.run train.py --wait -N 2 -- --system x\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--mem", "64000"), "--mem=64000M"),
        (("--mem", "64G"), "--mem=65536M"),
        (("--mem", "64GiB"), "--mem=65536M"),
        (("--mem", "64GB"), "--mem=65536M"),
        (("--mem", "1.5g"), "--mem=1536M"),
        (("-p", "gpu"), "-p gpu"),
        (("-J", "mine"), "-J mine"),
        (("-c", "4"), "--cpus-per-task=4"),
    ],
)
def test_units_and_short_options_are_sbatchs(words: tuple[str, ...], line: str):
    assert f"#SBATCH {line}\n" in script("slurm", *words, "train.py")


NONE = ("--gpus-per-node", "0")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (NONE, "--device cpu "),
        (("--device", "cpu"), "--device cpu "),
        (("--run", "--device cpu"), "--device cpu "),
        (("--run", "--device=cpu"), "--device=cpu "),
        ((*NONE, "--run", "--device=cuda"), "--device=cuda "),
        ((*NONE, "--directive", "--gpus=2"), ""),
        ((*NONE, "--directive", "-l mem=1"), "--device cpu "),
        ((*NONE, "--directive", "--constraint=nogpu"), "--device cpu "),
    ],
)
def test_without_gpus_the_workers_compute_on_the_cpu(words: tuple[str, ...], options: str):
    """In a job the runner expects GPUs, so it would have failed after hours in the queue."""
    text = script("slurm", *words, "train.py")
    assert f"hpcdask.run {options}train.py\n" in text
    assert "--gres" not in text


# Refusals


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("slurm", "nowhere.py"), "the script nowhere.py does not exist"),
        (("slurm",), "which program"),
        (("slurm", "-t", "soon", "train.py"), "walltime='soon' is not one of"),
        (("slurm", "--protocol", "ucx", "train.py"), 'submit --run "--protocol …"'),
        (("slurm", "--mem", "much", "train.py"), "0 for all of the node's (SLURM)"),
        (("slurm", "--run", "--protocol x", "train.py"), "--protocol: 'x' is not one of"),
        (("slurm", "--run", "'", "train.py"), "Check its quotes"),
        (("slurm", "--container", "'", "train.py"), "no closing quotation"),
        (("slurm", "--prologue", "a\nb", "train.py"), "the line 'a\\nb' has a control char"),
        (("slurm", "--device", "cpu", "--gpus-per-node", "2", "train.py"), "choose one of them"),
        (("pbs", "--launcher", "srun", "train.py"), "--launcher srun is not PBS's: use mpirun"),
        (("pbs", "--mem", "0", "train.py"), "is SLURM's"),
        (("sge", "-N", "2", "train.py"), "-pe NAME SLOTS"),
        (("sge", "--cpus-per-gpu", "2", "train.py"), "-pe NAME SLOTS"),
        (("sge", "--mem", "1GiB", "train.py"), "h_vmem"),
        (("oar", "--mem", "1GiB", "train.py"), "memory-per-core-property-name"),
        (("oar", "--cpus-per-gpu", "2", "train.py"), "bring their cores"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], expected: str, folder: Path):
    assert expected in refused(*DRY_RUN, *words)
    assert sorted(path.name for path in folder.iterdir()) == ["my train.py", "train.py"]


# Where there is no queue


def test_a_dry_run_needs_no_queue():
    result = hpcdask("submit", "--dry-run", "train.py")
    assert "#SBATCH" in result.stdout
    assert "this is a script for SLURM" in result.stderr


def test_where_there_is_no_queue():
    for words in (("submit", "train.py"), ("submit", "--system", "slurm", "train.py")):
        err = refused(*words)
        assert "hpcdask submit --dry-run --system" in err
        assert "Run this on a login node of the site. A container needs" in err
    with pytest.raises(UsageError, match=r"job_script\(\) still"):
        SlurmQueue().check()


@pytest.mark.parametrize(
    ("commands", "system"),
    [
        ("sbatch squeue scancel qsub qstat qdel", "slurm"),
        ("qsub qstat qdel", "pbs"),
        ("qsub qstat qdel qacct qconf", "sge"),
        ("qsub qstat qdel msub showq canceljob", "moab"),
        ("bsub bjobs bkill", "lsf"),
        ("oarsub oarstat oardel", "oar"),
    ],
)
def test_the_system_that_is_found(tmp_path: Path, commands: str, system: str):
    from hpcdask.submit.batch import find_system

    for command in commands.split():
        (tmp_path / command).write_text("")
        (tmp_path / command).chmod(0o700)
    assert find_system() == system


# Waiting


def answering(*answers: QueueStatus | Exception | None) -> SlurmQueue:
    """A queue that answers so in turn, and from then on as in the end."""
    found = [{"1": one} if isinstance(one, QueueStatus) else one or {} for one in answers]
    queue = SlurmQueue()
    queue.query = AsyncMock(side_effect=itertools.chain(found, itertools.repeat(found[-1])))
    queue.departed = AsyncMock(return_value={})
    return queue


def seen(state: JobState, reason: str = "", code: int | None = None) -> QueueStatus:
    return QueueStatus("1", state, reason, exit_code=code, nodes="n1")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "POLL_S", (0.01, 0.01))
    monkeypatch.setattr(follow, "SILENT_S", 0.1)
    monkeypatch.setattr(follow, "MISSING_S", 0.1)


@pytest.mark.usefixtures("fast")
def test_each_state_is_said_once_and_the_log_is_copied(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
):
    path = tmp_path / "log"
    path.write_bytes(b"one\n\xff")
    said: list[str] = []
    waits = seen(JobState.PENDING, "Resources")
    runs, over = seen(JobState.RUNNING), seen(JobState.FAILED, code=3)
    queue = answering(None, waits, waits, QueueError("squeue hangs"), runs, runs, over)
    assert asyncio.run(follow.wait(queue, "1", GrowingFile(path), said.append)) == over
    waiting, silent, running = said
    assert waiting == "job 1 is pending (Resources)"
    assert (silent, running) == ("squeue hangs; asking again", "job 1 runs on n1")
    assert capfdbinary.readouterr().out == b"one\n\xff"


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    ("answer", "words"), [(None, "does not show job 1 any more"), (QueueError("hangs"), "hangs")]
)
def test_a_queue_that_forgets_or_is_silent(tmp_path: Path, answer, words: str):
    log = GrowingFile(tmp_path / "log")
    with pytest.raises(QueueError, match=words):
        asyncio.run(follow.wait(answering(answer), "1", log, lambda text: None))


READER = """
import pathlib, sys
from hpcdask.jobs.logs import GrowingFile
from hpcdask.submit.follow import copy

log = GrowingFile(pathlib.Path("log"))
for _ in range(5):
    with log.path.open("a") as file:
        file.write(100_000 * "x" + chr(10))
    copy(log, lambda text: print(text, file=sys.stderr))
"""


def test_the_wait_goes_on_though_nobody_reads_stdout_any_more(tmp_path: Path):
    """Regression: `hpcdask submit --wait … | head` left the job running, without a word."""
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", f"{sys.executable} -c '{READER}' | head -c 1"],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "x"), done.stderr
    assert done.stderr == "nobody reads stdout any more; the wait goes on. Log: log\n"


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (seen(JobState.COMPLETED, code=0), 0, ""),
        (seen(JobState.FAILED, code=139), 139, "job 1 has ended: failed, exit code 139"),
        (seen(JobState.FAILED, "NODE_FAIL"), 1, "failed (NODE_FAIL), exit code unknown"),
        (seen(JobState.COMPLETED, "not shown"), 1, "completed (not shown), exit code unknown"),
        (seen(JobState.TIMEOUT), 1, "job 1 has ended: timeout"),
        (seen(JobState.PREEMPTED, code=15), 1, "preempted, exit code 15"),
        (seen(JobState.CANCELLED, "by ann"), 1, "cancelled (by ann)"),
        (QueueStatus("1", JobState.FAILED, copies=("57",)), 1, "runs it again as job 57"),
    ],
)
def test_exit_codes(tmp_path: Path, end: QueueStatus, code: int, words: str):
    from hpcdask.submit.batch import Batch

    (tmp_path / "hpcdask-1.log").touch()
    said: list[str] = []
    batch = Batch(answering(end), "x", str(tmp_path), "")
    assert follow.result(batch, "1", end, said.append) == code
    assert words in "\n".join(said)


# The command line


def test_completion_by_the_shell():
    words = {"COMP_WORDS": "hpcdask sub", "COMP_CWORD": "1"}
    asked = {"_HPCDASK_COMPLETE": "bash_complete", **words}
    done = CliRunner().invoke(main, [], prog_name="hpcdask", env=asked)
    assert done.output == "plain,submit\n"


@pytest.mark.parametrize("end", ["\n", "\x0b", "\N{LINE SEPARATOR}"])
def test_no_name_brings_a_line_into_a_script(end: str, folder: Path, monkeypatch):
    bad, system = f"a{end}touch owned", "slurm"
    (folder / f"{bad}.py").touch()
    for words in (
        ["-q", bad, "train.py"],
        ["-A", bad, "train.py"],
        [f"{bad}.py"],
        ["train.py", bad],
        ["-m", bad],
    ):
        assert "line end" in refused(*DRY_RUN, system, *words)
    (folder / bad).mkdir()
    (folder / bad / "train.py").touch()
    monkeypatch.chdir(folder / bad)
    monkeypatch.setenv("PWD", str(folder / bad))
    assert "line end" in refused(*DRY_RUN, system, "train.py")
