"""Bad input gets one clear line and exit code 2, and nothing is started or left behind."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from clock import stretched
from launching import needs, openmpi_launcher, wait_for
from running import Ended, Site, under

pytestmark = pytest.mark.mpi
FAKES = Path(__file__).parents[1] / "fakes"
HOST = socket.gethostname()
RUN = ("python", "-m", "hpcdask.run")
PROGRAM = """
import os, sys
from distributed import Client
print("started", flush=True)
with Client() as client:
    print(len(client.nthreads()), client.submit(sum, [1, 2]).result())
"""
#: Two hosts, in name, of MPICH's launcher.
TWO_HOSTS = ["-launcher", "fork", "-hosts", "a,b", "-ppn", "1"]


@pytest.fixture
def site(site: Site) -> Site:
    """A site where what HIDDEN lists cannot be imported."""
    hidden = site.folder / "modules"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import os, sys\n"
        "for name in filter(None, os.environ.get('HIDDEN', '').split(',')):\n"
        "    sys.modules[name] = None\n"
    )
    site.env["PYTHONPATH"] = with_modules(hidden)
    return site


def with_modules(*folders: Path) -> str:
    """Return PYTHONPATH with these folders first."""
    before = [str(folder) for folder in folders]
    return os.pathsep.join(filter(None, [*before, os.environ.get("PYTHONPATH")]))


def gpus(count: int, **more: str) -> dict[str, str]:
    return {"FAKE_NVML": json.dumps([{"uuid": f"GPU-{i:08x}"} for i in range(count)]), **more}


def check_refused(site: Site, *options, words: list[str], nodes: int = 1, **kwargs) -> None:
    """One line (of each node) with all words, exit code 2, no traceback, no program's output."""
    ended = site.run(*options, **{"program": PROGRAM, "code": 2, **kwargs})
    assert len(ended.errors) == nodes, str(ended)
    missing = [word for word in words if word not in ended.errors[0]]
    assert not missing, f"{missing} not in: {ended.errors[0]}"
    assert "Traceback" not in ended.err, str(ended)
    assert not ended.out, str(ended)
    site.check_nothing_left()


def check_works(ended: Ended, *words: str) -> None:
    assert ended.out.split() == ["started", *words], str(ended)
    assert not ended.errors, str(ended)
    assert "Traceback" not in ended.err, str(ended)


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


#: Launcher, device, options, variables, and what the line says.
REFUSED = [
    ("mpich", "cpu", ["nowhere.py"], {}, ["script nowhere.py does not exist", "shared file sys"]),
    ("alone", "cpu", ["-m", "no_such.module"], {}, ["no module no_such in", "install"]),
    ("openmpi", "cpu", ["--memory-limit", "lots"], {}, ["--memory-limit", "'lots'", "64GiB"]),
    ("mpich", "cpu", ["--memory-limit", "lots"], {}, ["--memory-limit", "'lots'", "64GiB"]),
    ("openmpi", "cpu", ["--workers-min", "9"], {}, ["--workers-min 9", "2 workers"]),
    (
        *("openmpi", "auto", [], {"SLURM_JOB_ID": "4711", **NO_GPU}),
        [HOST, "4711", "#SBATCH --gpus-per-node=1", "--gpus-per-task=1", "--device cpu"],
    ),
    ("alone", "cuda", [], NO_GPU, [HOST, "nvidia-smi", "--device cpu"]),
    pytest.param(
        *("openmpi", "auto", [], gpus(4, CUDA_VISIBLE_DEVICES="3")),
        [HOST, "only 1 distinct GPU:", "--oversubscribe"],
        marks=needs("cuda"),
    ),
    (
        *("alone", "cpu", ["--protocol", "ucx"], {"HIDDEN": "distributed_ucxx"}),
        ["--protocol ucx", "distributed_ucxx", 'pip install "cupy-cuda1'],
    ),
    (
        *("alone", "auto", [], gpus(2, HIDDEN="cuda")),
        ["cuda-bindings", "GPU", 'pip install "cupy-cuda1'],
    ),
]


@pytest.mark.parametrize(
    ("site", "device", "options", "env", "words"),
    REFUSED,
    indirect=["site"],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_it_is_told_in_one_line(site: Site, device: str, options, env, words):
    program = "" if options and options[-1].endswith((".py", ".module")) else PROGRAM
    if "FAKE_NVML" in env:
        env = {**env, "PYTHONPATH": with_modules(site.folder / "modules", FAKES)}
    check_refused(site, *options, words=words, program=program, device=device, env=env)


def test_what_only_one_rank_lacks(site: Site):
    (site.folder / "lacking.py").write_text(PROGRAM)
    lacking = [*RUN, "--device", "cpu", "--local-directory", "/proc/nowhere", "lacking.py"]
    words = ["--local-directory", "rank 1", HOST, "can write"]
    check_refused(site, "lacking.py", ":", "-n", "1", *lacking, program="", n=1, words=words)


def test_the_scheduler_file_of_a_living_cluster(site: Site):
    file = site.folder / "cluster.json"
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        address = f"tls://127.0.0.1:{scheduler.getsockname()[1]}"
        file.write_text(content(address))
        words = [str(file), address, "still answers"]
        check_refused(site, "--scheduler-file", file, words=words)
    assert file.read_text() == content(address)


def content(address: str) -> str:
    return json.dumps({"type": "Scheduler", "address": address, "workers": {}, "services": {}})


@under("openmpi", "mpich")
def test_help_is_printed_once(site: Site):
    ended = site.run("--help")
    assert ended.out.count("Usage: ") == 1, str(ended)


# What only looks bad


WRAPPER = """#!/bin/sh
ulimit -c 0
python -m hpcdask.run "$@"
exit $?
"""


@pytest.mark.long
@under("openmpi", "mpich")
def test_ranks_behind_a_wrapper(site: Site):
    """Such as binds GPUs: MPI's launcher is not the ranks' parent then."""
    wrapper = site.folder / "wrapper"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o700)
    if "open" in site.launcher.name.lower():
        site.launcher.prefix += ["--bind-to", "core"]
    program = f"{PROGRAM}print(len(os.sched_getaffinity(0)))"
    ended = site.run("--timeout", "20s", program=program, runner=[str(wrapper)])
    check_works(ended, "2", "3", str(len(os.sched_getaffinity(0))))


@pytest.mark.parametrize("streams", ["2>/dev/full", "<&- >&- 2>&-"])
@pytest.mark.long
@under("alone")
def test_standard_streams_that_are_closed_or_full(site: Site, streams: str):
    """Daemons have none, and a log may be on a disk that is full."""
    shell = ["bash", "-c", f'exec "$@" {streams}', "bash", *RUN]
    site.run(program=f"{PROGRAM}open('done', 'w').close()", runner=shell)
    assert (site.folder / "done").exists()


LATE_PRELOAD = """
import os, time
def dask_setup(worker):
    if worker.name.endswith("-1"):
        while not os.path.exists("PLACE/started"):
            time.sleep(0.05)
        os._exit(7)
"""
UNTIL_TOLD = """
import time
open("started", "w").close()
while not os.path.exists("told"):
    time.sleep(0.05)
print("end")
"""


@pytest.mark.long
def test_a_worker_that_does_not_start_once_enough_others_work(site: Site):
    """Before the cluster is ready this has the same end."""
    late = site.folder / "late.py"
    late.write_text(LATE_PRELOAD.replace("PLACE", str(site.folder)))
    run = site.start("--workers-min", "1", "--preload", late, program=PROGRAM + UNTIL_TOLD)
    run.line("hpcdask: a worker of rank 1", stream="err", timeout=60)
    (site.folder / "told").touch()
    ended = run.end(code=0)
    check_works(ended, "1", "3", "end")
    assert "1 of 2 workers on 1 node" in ended.err


@pytest.mark.long
def test_what_looks_bad_and_is_not(site: Site):
    """A long scratch folder, no GPU on a workstation, the file of a dead cluster, a taken port."""
    folder = site.folder / ("long-" * 24)  # a socket's path may have 107 characters
    file = site.folder / "cluster.json"
    with socket.create_server(("127.0.0.1", 0)) as gone:
        file.write_text(content(f"tls://127.0.0.1:{gone.getsockname()[1]}"))
    options = ("--local-directory", folder, "--scheduler-file", file)
    with wait_for(lambda: server_on(8787), 60, "port 8787, which another test's dashboard has"):
        ended = site.run(*options, program=PROGRAM, device="auto", env=NO_GPU)
    check_works(ended, "2", "3")
    assert not list(folder.iterdir())
    site.check_nothing_left()
    assert not file.exists()
    assert ended.err.count("no GPU here") == 1
    assert "dashboard http://" in ended.err
    assert ":8787/" not in ended.err


def server_on(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError:
        return None


# Parts that do not start


@under("alone")
def test_a_scheduler_that_does_not_start_says_why(site: Site):
    wrong = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "no_such_module"}
    (line,) = site.run(program=PROGRAM, n=1, env=wrong, code=1).errors
    assert "the scheduler did not start: ModuleNotFoundError" in line
    assert "no_such_module" in line


# Launchers


@under("mpich")
def test_mpi_that_is_not_the_launcher_s(site: Site):
    """Two hosts (in name), hydra's variables, and Open MPI's library, which knows none of them."""
    site.launcher.prefix += TWO_HOSTS
    foreign = openmpi_launcher().env
    env = {name: foreign[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")}
    words = ["2 ranks", "rank 0 of 1", "mpirun of the same MPI"]
    check_refused(site, env=env, words=words, nodes=2)


@under("mpich")
def test_an_mpi_library_that_is_missing_on_the_second_node(site: Site):
    """Regression: its rank said nothing, and rank 0 waited for it."""
    site.launcher.prefix += TWO_HOSTS
    missing = "export MPI4PY_MPIABI=openmpi MPI4PY_LIBMPI=/no/such/libmpi.so"
    wrapper = ["sh", "-c", f'[ "$PMI_RANK" = 0 ] || {missing}; exec "$@"', "sh", *RUN]
    check_refused(site, runner=wrapper, words=["cannot load an MPI library", "LD_LIBRARY_PATH"])


@under("mpich")
def test_several_nodes_of_mpich_without_mpi4py(site: Site):
    """Its nodes have nothing in common by which ranks could find a file of their launch."""
    site.launcher.prefix += TWO_HOSTS
    timeout = f"{stretched(8)}s"
    words = ["mpi4py", 'pip install "mpi4py']
    check_refused(site, "--timeout", timeout, env={"HIDDEN": "mpi4py"}, words=words, nodes=2)


#: One rank never gets to its program.
LATE = 'if [ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 1 ]; then exec sleep 600; fi; exec "$@"'
LATE_RUN = ["sh", "-c", LATE, "sh", *RUN]


@under("openmpi", "mpich")
def test_a_rank_that_never_arrives(site: Site):
    limit = stretched(3)
    words = ["rank 1 of 3", f"within {limit} s", HOST, "--timeout"]
    check_refused(site, "--timeout", f"{limit}s", n=3, runner=LATE_RUN, words=words)


@under("openmpi", "mpich")
def test_a_bad_value_while_a_rank_is_late(site: Site):
    """Regression: MPICH waited for the late one."""
    check_refused(site, "--timeout", "soon", runner=LATE_RUN, words=["--timeout", "'soon'"])


@pytest.mark.long
@under("mpich")
def test_a_rank_that_never_arrives_at_mpi(site: Site):
    """MPI's own start waits for every rank, and cannot say for whom."""
    site.launcher.prefix += TWO_HOSTS
    limit = stretched(3)
    ended = site.start("--timeout", f"{limit}s", program=PROGRAM, runner=LATE_RUN).end()
    assert ended.code != 0
    assert f"waited {limit} s in MPI" in ended.err
    assert "--timeout" in ended.err
    assert "started" not in ended.out


@under("openmpi")
def test_a_worker_that_does_not_start_ends_the_run(site: Site):
    """Regression: the line that the run ends was followed by the one that the cluster is ready."""
    preload = site.folder / "wrong.py"
    preload.write_text("import os\ndef dask_setup(worker):\n    os._exit(7)\n")
    ended = site.run("--preload", preload, program=PROGRAM, n=1, code=1)
    (line,) = ended.errors
    assert "did not start: " in line
    assert "ready in" not in ended.err, str(ended)
