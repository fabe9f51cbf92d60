"""What bad input gets: one clear line, exit code 2, and nothing is started or left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clock import clock, stretched
from hpcdask.comm import fabric
from hpcdask.errors import UsageError
from hpcdask.node.preflight import check_preloads
from hpcdask.runner.options import parse
from hpcdask.spec.specs import WorkerSpec
from launching import (
    Launcher,
    Result,
    clean_environment,
    made_by_hpcdask,
    name_of,
    needs,
    openmpi_launcher,
    wait_for,
)

pytestmark = pytest.mark.mpi

FAKES = Path(__file__).parents[1] / "fakes"
RUN = ("python", "-m", "hpcdask.run")
CPU = (*RUN, "--device", "cpu")
PROGRAM = """
import os, sys
from distributed import Client
print("started", flush=True)
with Client() as client:
    print(len(client.nthreads()), client.submit(sum, [1, 2]).result())
"""


@pytest.fixture
def private() -> Iterator[Path]:
    """The home and temporary folder of a run, with a short path; nothing may remain in it."""
    folder = Path(tempfile.mkdtemp(prefix="hd-", dir="/tmp"))
    (folder / "home").mkdir()
    (folder / "tmp").mkdir()
    try:
        yield folder
        wait_for(lambda: not remains(folder), 3, "the run's folders to be removed")
    except AssertionError:
        pytest.fail(f"left behind: {remains(folder)}")
    finally:
        shutil.rmtree(folder)


def remains(folder: Path) -> list[str]:
    """What lies there, but for the session folder that Open MPI leaves without its mpirun."""
    return [str(path) for path in made_by_hpcdask(folder)] + [
        str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith("ompi.")
    ]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def with_folders(launcher: Launcher, private: Path) -> Launcher:
    launcher.env = {
        **launcher.env,
        "HOME": str(private / "home"),
        "TMPDIR": str(private / "tmp"),
        "PYTHON": sys.executable,
    }
    return launcher


@pytest.fixture
def mpirun(openmpi: Launcher, private: Path) -> Launcher:
    """Open MPI's launcher, whose ranks have folders of their own."""
    return with_folders(openmpi, private)


@pytest.fixture
def mpis(mpi: Launcher, private: Path) -> Launcher:
    """Each MPI's launcher in turn, likewise."""
    return with_folders(mpi, private)


@pytest.fixture
def alone(private: Path) -> Iterator[Launcher]:
    """No launcher: the program itself, started by hand."""
    drop_count = ["sh", "-c", 'shift 2; exec "$@"', "sh"]
    launcher = with_folders(Launcher("no launcher", drop_count, clean_environment()), private)
    try:
        yield launcher
    finally:
        launcher.close()


def errors(result: Result) -> list[str]:
    return [line for line in result.err.splitlines() if line.startswith("hpcdask: error: ")]


def assert_refused(result: Result, *words: str, within: float = 20, nodes: int = 1) -> None:
    """One line (of each node) with all words, exit code 2, no traceback, no program's output."""
    shown = f"{result.code} after {result.seconds:.1f} s\n{result.err}\n{result.out}"
    assert result.code == 2, shown
    assert len(errors(result)) == nodes, shown
    missing = [word for word in words if word not in errors(result)[0]]
    assert not missing, f"{missing} not in: {errors(result)[0]}"
    assert "Traceback" not in result.err, shown
    assert not result.out, shown
    assert result.seconds < within, shown


def assert_works(result: Result, workers: int) -> None:
    assert result.code == 0, result.err
    assert result.out.split() == ["started", str(workers), "3"]
    assert not errors(result)
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--preload", "nothere.part"), "--preload nothere.part: there is no module nothere"),
        (("--n-workers", "4"), "--n-workers: the launcher says how many workers there are"),
    ],
)
def test_what_cannot_be_loaded_or_is_the_launcher_s(mpirun: Launcher, script, words, said):
    """A preload that is missing was 50 lines of traceback."""
    assert_refused(mpirun.run(2, *CPU, *words, script), said)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["os.path", "json"], None),
        (["import sys; sys.path.insert(0, 'x')", "then"], None),
        (["http://node/x.py", "then"], None),
        (["./mod"], "there is no module ./mod (a file's name ends in .py)"),
        (["json", "then.part"], "there is no module then "),
    ],
)
def test_preloads_that_may_be_there(names: list[str], message: str | None):
    spec = WorkerSpec(preload=tuple(names))
    if message is None:
        check_preloads(spec)
        return
    with pytest.raises(UsageError, match=re.escape(message)):
        check_preloads(spec)


def gpus(count: int) -> dict[str, str]:
    return {"FAKE_NVML": json.dumps([{"uuid": f"GPU-{i:08x}"} for i in range(count)])}


def pythonpath(*folders: Path) -> dict[str, str]:
    before = [str(folder) for folder in folders]
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*before, os.environ.get("PYTHONPATH")]))}


# --- the program ----------------------------------------------------------------------------------


def test_script_that_does_not_exist(mpich, private, tmp_path):
    result = with_folders(mpich, private).run(2, *CPU, "nowhere.py", cwd=tmp_path)
    assert_refused(result, "script nowhere.py does not exist", str(tmp_path), "shared file system")


def test_package_is_imported_by_the_program_alone(alone, tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("print('package', end=' ')")
    (tmp_path / "pack/inner.py").write_text("print('module')")
    result = alone.run(1, *CPU, "-m", "pack.inner", cwd=tmp_path)
    assert (result.code, result.out) == (0, "package module\n"), result.err
    result = alone.run(1, *CPU, "-m", "pack.other", cwd=tmp_path)
    assert result.code == 1
    assert "No module named pack.other" in result.err  # Python's own words


def test_module_that_does_not_exist(alone):
    result = alone.run(1, *CPU, "-m", "no_such.module")
    assert_refused(result, "no module no_such in", "install")


# --- options --------------------------------------------------------------------------------------

BAD_VALUES = [
    (["--timeout", "none"], ["--timeout", "must be a time", "5min"]),
    (["--memory-limit", "64 bananas"], ["--memory-limit", "'64 bananas'", "64GiB", "8e9", "auto"]),
    (["--memory-limit", "-1GiB"], ["--memory-limit", "'-1GiB'", "64GiB"]),
    (["--rmm-pool-size", "most"], ["--rmm-pool-size", "'most'", "64GiB", "0.8", "80%"]),
    (["--device-memory-limit", "150%"], ["--device-memory-limit", "'150%'", "80%"]),
    (["--timeout", "soon"], ["--timeout", "'soon'", "90s", "1h30m", "00:30:00"]),
    (["--timeout", "-5s"], ["--timeout", "'-5s'", "90s"]),
    (["--lifetime", "1 fortnight"], ["--lifetime", "'1 fortnight'", "2 hours"]),
    (["--resources", "GPU"], ["--resources", "'GPU'", "GPU=2 MEM=10e9"]),
    (["--resources", "GPU=many"], ["--resources", "'GPU=many'", "GPU=2"]),
    (["--nthreads", "0"], ["--nthreads", "'0'", "at least 1"]),
    (["--nthreads", "2.5"], ["--nthreads", "'2.5'", "whole number"]),
    (["--workers-min", "all"], ["--workers-min", "'all'", "at least 1"]),
    (["--device", "gpu"], ["--device", "'gpu'", "auto", "cuda", "cpu"]),
    (["--protocol", "infiniband"], ["--protocol", "'infiniband'", "auto", "tcp", "ucx"]),
    (["--memory-limt", "1GiB"], ["--memory-limt", "--memory-limit", "--help"]),
]


@pytest.mark.parametrize(("options", "words"), BAD_VALUES, ids=lambda part: " ".join(part[:2]))
def test_bad_value(capfd, options, words):
    """Where the command line is read."""
    with pytest.raises(UsageError) as refused:
        parse([*CPU[len(RUN) :], *options, "program.py"])
    assert refused.value.exit_code == 2
    text = str(refused.value)
    assert "\n" not in text
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"
    assert capfd.readouterr() == ("", "")


def test_bad_address_of_the_dashboard(alone, script):
    result = alone.run(1, *CPU, "--dashboard-address", ":70000", script)
    assert_refused(result, "--dashboard-address", "':70000'", ":8787", "any free port")
    result = alone.run(1, *CPU, "--dashboard-address", ":\u00b2", script)
    assert_refused(result, "--dashboard-address", "is not an address")


def test_bad_value_is_said_once(mpis, script):
    result = mpis.run(2, *CPU, "--memory-limit", "lots", script)
    assert_refused(result, "--memory-limit", "'lots'", "64GiB")


@pytest.mark.long
def test_a_python_without_pidfd(mpirun, script, tmp_path):
    """As conda's, which is made for old kernels."""
    (tmp_path / "sitecustomize.py").write_text("import os; del os.pidfd_open")
    result = mpirun.run(2, *CPU, script, env={"PYTHONPATH": str(tmp_path)})
    assert_works(result, 2)


def test_help_is_printed_once(mpis):
    result = mpis.run(2, *CPU, "--help")
    assert result.code == 0, result.err
    assert result.out.count("Usage: ") == 1, result.out


def test_more_workers_than_there_will_be(mpirun, script):
    result = mpirun.run(2, *CPU, "--workers-min", "9", script)
    assert_refused(result, "--workers-min 9", "2 workers")


def test_option_without_its_value(alone):
    for options in (["-m"], ["--interface"]):
        with pytest.raises(UsageError, match=options[0]):
            parse(options)
    assert_refused(alone.run(1, *CPU, "--interface"), "--interface")


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.long
def test_relative_local_directory_of_a_program_that_goes_elsewhere(alone, script, tmp_path):
    (tmp_path / "scratch").mkdir()
    script.write_text(f'import os; os.chdir("/")\n{PROGRAM}')
    result = alone.run(1, *CPU, "--local-directory", "scratch", script, cwd=tmp_path)
    assert_works(result, len(os.sched_getaffinity(0)))
    assert not list((tmp_path / "scratch").iterdir())


def test_local_directory_that_one_rank_cannot_write(mpirun, script):
    apart = ("-n", "1", *CPU, "--local-directory", "/proc/nowhere", script)
    result = mpirun.run(1, *CPU, script, ":", *apart)
    words = ("--local-directory", "/proc/nowhere", "can write", "rank 1", socket.gethostname())
    assert_refused(result, *words)


# --- what only looks bad --------------------------------------------------------------------------


WRAPPER = """#!/bin/sh
ulimit -c 0
python -m hpcdask.run "$@"
exit $?
"""


def test_ranks_behind_a_wrapper(mpis, tmp_path):
    """Such as binds GPUs: MPI's launcher is not the ranks' parent then."""
    program = tmp_path / "program.py"
    program.write_text(f"{PROGRAM}print(len(os.sched_getaffinity(0)))")
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o700)
    bind = ["--bind-to", "core"] if "open" in mpis.name.lower() else []
    result = mpis.run(2, *bind, wrapper, "--device", "cpu", "--timeout", "20s", program)
    assert result.code == 0, result.err
    assert result.out.split() == ["started", "2", "3", str(len(os.sched_getaffinity(0)))]


AT_THE_IMPORTS = """
import os, sys
class Notice:
    def find_spec(self, name, path=None, target=None):
        if name == "distributed" and "hpcdask.node.preload" in sys.modules:
            with open(os.environ["NOTED"], "a") as file:
                print(len(os.sched_getaffinity(0)), file=file)
sys.meta_path.insert(0, Notice())
"""


def test_pinned_ranks_import_on_all_cores_of_the_job(mpirun, script, tmp_path):
    """Where each has one core, as by default, the probe and the imports would share it."""
    (tmp_path / "sitecustomize.py").write_text(AT_THE_IMPORTS)
    env = {"PYTHONPATH": str(tmp_path), "NOTED": str(tmp_path / "noted")}
    result = mpirun.run(2, "--bind-to", "core", *CPU, script, env=env)
    assert_works(result, 2)
    cores = str(len(os.sched_getaffinity(0)))
    assert set((tmp_path / "noted").read_text().split()) == {cores}


@pytest.mark.parametrize("streams", ["2>/dev/full", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_or_full(alone, tmp_path, streams):
    """Daemons have none, and a log may be on a disk that is full."""
    program = tmp_path / "program.py"
    program.write_text(f"{PROGRAM}open('done', 'w').close()")
    line = f"exec python -m hpcdask.run --device cpu program.py {streams}"
    result = alone.run(1, "bash", "-c", line, cwd=tmp_path, timeout=40)
    assert result.code == 0, result.err
    assert (tmp_path / "done").exists()


@pytest.mark.long
def test_parent_that_ignores_the_end_of_its_children(alone, script):
    ignore = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    start = f"{ignore}; os.execvp(sys.argv[1], sys.argv[1:])"
    result = alone.run(1, "python", "-c", start, *CPU, script)
    assert_works(result, len(os.sched_getaffinity(0)))


def test_scheduler_that_does_not_start_says_why(alone, script):
    wrong = {"DASK_DISTRIBUTED__SCHEDULER__PRELOAD": "no_such_module"}
    result = alone.run(1, *CPU, script, env=wrong)
    assert result.code == 1, result.err
    (line,) = errors(result)
    assert "the scheduler did not start: ModuleNotFoundError" in line
    assert "no_such_module" in line


LATE_PRELOAD = """
import os, time
def dask_setup(worker):
    if worker.name.endswith("-1"):
        while not os.path.exists("STARTED"):
            time.sleep(0.05)
        os._exit(7)
"""
#: Goes on until that was told.
UNTIL_TOLD = (
    PROGRAM
    + """
import time
open("STARTED", "w").close()
while "a worker of rank" not in open("ERRORS").read():
    time.sleep(0.05)
print("end")
"""
)


def run_with_a_late_worker(launcher: Launcher, n: int, folder: Path) -> Result:
    started, errors = str(folder / "started"), folder / "errors"
    (folder / "late.py").write_text(LATE_PRELOAD.replace("STARTED", started))
    program = folder / "program.py"
    text = UNTIL_TOLD.replace("STARTED", started).replace("ERRORS", str(errors))
    program.write_text(text)
    options = ("--workers-min", "1", "--preload", folder / "late.py")
    with errors.open("w") as stream:
        result = launcher.run(n, *CPU, *options, program, stderr=stream)
    return replace(result, err=errors.read_text())


def test_worker_that_does_not_start_once_enough_others_work(mpirun, tmp_path):
    """Before the cluster is ready this has the same end."""
    result = run_with_a_late_worker(mpirun, 2, tmp_path)
    assert result.code == 0, result.err
    assert result.out.split() == ["started", "1", "3", "end"]
    assert "a worker of rank 1" in result.err
    assert "1 of 2 workers on 1 node" in result.err
    assert not errors(result)


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core, so one worker")
def test_worker_that_does_not_start_beside_others_of_its_rank(alone, tmp_path):
    result = run_with_a_late_worker(alone, 1, tmp_path)
    assert result.code == 0, result.err
    assert result.out.split()[-1] == "end"
    assert "a worker of rank 0" in result.err
    assert not errors(result)


def test_what_looks_bad_and_is_not(mpirun, script, tmp_path):
    """A long scratch folder, no GPU on a workstation, the file of a dead cluster, a taken port."""
    folder = tmp_path / ("long-" * 24)  # a socket's path may have 107 characters
    file = tmp_path / "cluster.json"
    file.write_text(content(f"tls://127.0.0.1:{free_port()}"))
    keys = tmp_path / "cluster.json.keys"
    keys.mkdir(mode=0o700)
    (keys / "ca.pem").write_text("of the dead cluster")
    options = ("--local-directory", folder, "--scheduler-file", file)
    with wait_for(lambda: server_on(8787), 60, "port 8787, which another test's dashboard has"):
        result = mpirun.run(2, *RUN, *options, script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert_works(result, 2)
    assert not list(folder.iterdir())
    wait_for(lambda: not file.exists() and not keys.exists(), 3, "the file and keys to be removed")
    assert result.err.count("no GPU here") == 1
    assert "dashboard http://" in result.err
    assert ":8787/" not in result.err


def server_on(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError:
        return None


# --- devices --------------------------------------------------------------------------------------


@needs("cuda")
def test_more_ranks_than_visible_devices(mpirun, script):
    env = {**pythonpath(FAKES), **gpus(4), "CUDA_VISIBLE_DEVICES": "3"}
    result = mpirun.run(2, *RUN, script, env=env)
    words = ("2 ranks", "only 1 distinct GPU:", "--oversubscribe")
    assert_refused(result, socket.gethostname(), *words)


def test_no_gpu_inside_a_job(mpirun, script):
    env = {"SLURM_JOB_ID": "4711", "CUDA_VISIBLE_DEVICES": ""}
    result = mpirun.run(2, *RUN, script, env=env)
    assert_refused(
        result,
        socket.gethostname(),
        "4711",
        "#SBATCH --gpus-per-node=1",
        "--gpus-per-task=1",
        "--device cpu",
    )


@pytest.mark.long
def test_no_gpu_inside_another_system_s_job(alone, script):
    env = {"PBS_JOBID": "4711", "CUDA_VISIBLE_DEVICES": ""}
    result = alone.run(1, *RUN, "--device", "cuda", script, env=env)
    assert_refused(result, "4711", "ngpus=1", "--device cpu")


def test_no_gpu_where_one_is_asked_for(alone, script):
    result = alone.run(1, *RUN, "--device", "cuda", script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert_refused(result, socket.gethostname(), "nvidia-smi", "--device cpu")


# --- network --------------------------------------------------------------------------------------


@pytest.mark.long
def test_interface_that_only_one_rank_lacks(mpirun, script):
    apart = ("-n", "1", *CPU, "--interface", "ib7", script)
    result = mpirun.run(1, *CPU, "--interface", "lo", script, ":", *apart)
    words = ("--interface", "rank 1", "no interface ib7", socket.gethostname(), "lo")
    assert_refused(result, *words)


@pytest.mark.long
def test_interface_auto(mpirun, script):
    result = mpirun.run(2, *CPU, "--interface", "auto", script)
    if fabric.interfaces():
        assert_works(result, 2)
    else:
        assert_refused(result, "--interface auto", "no kind of network interface in common")


@needs("cuda")
def test_ucx_that_cannot_work_on_these_gpus(alone, script):
    env = {**pythonpath(FAKES), **gpus(2)}
    result = alone.run(1, *RUN, "--protocol", "ucx", "--rmm-async", script, env=env)
    assert_refused(result, "--protocol ucx cannot work", "--rmm-async", "cannot be shared")


def test_dashboard_port_in_use(alone, script):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = alone.run(1, *CPU, "--dashboard-address", f"127.0.0.1:{port}", script)
    assert_refused(result, "--dashboard-address", f"port {port}", socket.gethostname(), "in use")


def test_dashboard_port_in_use_under_mpirun(mpirun, script):
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = mpirun.run(2, *CPU, "--dashboard-address", f":{port}", script)
    assert_refused(result, "--dashboard-address", f"port {port}", "in use")


def test_dashboard_on_an_address_of_another_machine(alone, script):
    result = alone.run(1, *CPU, "--dashboard-address", "203.0.113.7:8787", script)
    assert_refused(result, "--dashboard-address", "203.0.113.7")


# --- launchers ------------------------------------------------------------------------------------


def test_mpi_that_is_not_the_launcher_s(mpich, private, script):
    """Two hosts (in name), hydra's variables, and Open MPI's library, which knows none of them."""
    mpich.prefix += ["-launcher", "fork", "-hosts", "a,b", "-ppn", "1"]
    foreign = openmpi_launcher().env
    env = {name: foreign[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")}
    result = with_folders(mpich, private).run(2, *CPU, script, env=env)
    assert_refused(result, "2 ranks", "rank 0 of 1", "mpirun of the same MPI", nodes=2)


def test_mpi_library_that_is_missing_on_the_second_node(mpich, private, script):
    """Regression: its rank said nothing, and rank 0 waited for it."""
    mpich.prefix += ["-launcher", "fork", "-hosts", "a,b", "-ppn", "1"]
    missing = "export MPI4PY_MPIABI=openmpi MPI4PY_LIBMPI=/no/such/libmpi.so"
    wrapper = ["sh", "-c", f'[ "$PMI_RANK" = 0 ] || {missing}; exec "$@"', "sh"]
    result = with_folders(mpich, private).run(2, *wrapper, *CPU, script)
    assert_refused(result, "cannot load an MPI library", "LD_LIBRARY_PATH")


@pytest.mark.long
def test_mpi_that_is_not_the_launcher_s_does_not_matter_on_one_node(mpich, private, script):
    foreign = openmpi_launcher().env
    env = {name: foreign[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")}
    assert_works(with_folders(mpich, private).run(2, *CPU, script, env=env), 2)


def test_mpi_library_that_cannot_be_loaded(alone, script):
    env = {"JSM_NAMESPACE_RANK": "0", "MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    env["MPI4PY_MPIABI"] = "openmpi"
    result = alone.run(1, *CPU, script, env=env)
    assert_refused(result, "cannot load an MPI library", "LD_LIBRARY_PATH")


def late(index: int) -> list[str]:
    """A wrapper in which one rank never gets to its program."""
    condition = f'if [ "${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}}" = {index} ]; then exec sleep 600; fi'
    return ["sh", "-c", f'{condition}; exec "$@"', "sh"]


def test_rank_that_never_arrives(mpis, script, private):
    limit = stretched(3)
    result = with_folders(mpis, private).run(3, *late(1), *CPU, "--timeout", f"{limit}s", script)
    words = ("rank 1 of 3", f"within {limit} s", socket.gethostname(), "--timeout")
    assert_refused(result, *words, within=limit + 17)


@pytest.mark.long
def test_rank_0_that_never_arrives(mpis, script, private):
    limit = stretched(3)
    result = with_folders(mpis, private).run(2, *late(0), *CPU, "--timeout", f"{limit}s", script)
    words = ("rank 1 of 2", "rank 0", f"within {limit} s", "--timeout")
    assert_refused(result, *words, within=limit + 17)


def test_bad_value_while_a_rank_is_late(mpis, script, private):
    """MPICH waited for the late one."""
    result = with_folders(mpis, private).run(2, *late(1), *CPU, "--timeout", "soon", script)
    assert_refused(result, "--timeout", "'soon'")


def test_ranks_that_only_the_launcher_s_variables_count(alone, script):
    """Such as jsrun, with an MPI that is not its own."""
    env = {name: openmpi_launcher().env[name] for name in ("MPI4PY_MPIABI", "LD_LIBRARY_PATH")}
    env |= {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "4"}
    result = alone.run(1, *CPU, script, env=env)
    assert_refused(result, "4 ranks", "rank 0 of 1", "mpirun of the same MPI")


@pytest.mark.long
def test_rank_that_never_arrives_at_mpi(mpich, script, private):
    """MPI's own start waits for every rank, and cannot say for whom."""
    started, limit = clock(), stretched(3)
    launcher = with_folders(mpich, private)
    launcher.prefix = [*launcher.prefix, "-launcher", "fork", "-hosts", "a,b", "-ppn", "1"]
    result = launcher.run(2, *late(1), *CPU, "--timeout", f"{limit}s", script)
    assert result.code != 0
    assert f"waited {limit} s in MPI" in result.err
    assert "--timeout" in result.err
    assert "started" not in result.out
    assert clock() - started < limit + 17


# --- scheduler files ------------------------------------------------------------------------------


def content(address: str) -> str:
    return json.dumps({"type": "Scheduler", "address": address, "workers": {}, "services": {}})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_scheduler_file_that_is_something_else(alone, script, tmp_path):
    precious = tmp_path / "results.json"
    precious.write_text("[1, 2, 3]")
    result = alone.run(1, *CPU, "--scheduler-file", precious, script)
    assert_refused(result, str(precious), "not a scheduler file")
    assert precious.read_text() == "[1, 2, 3]"


def test_scheduler_file_without_a_name(alone, script):
    """As of a variable that is not set."""
    result = alone.run(1, *CPU, "--scheduler-file", "", script)
    assert_refused(result, "--scheduler-file", "empty")


def test_scheduler_file_of_a_living_cluster(mpirun, script, tmp_path):
    file = tmp_path / "cluster.json"
    keys = tmp_path / "cluster.json.keys"
    keys.mkdir(mode=0o700)
    (keys / "ca.pem").touch()
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        address = f"tls://127.0.0.1:{scheduler.getsockname()[1]}"
        file.write_text(content(address))
        result = mpirun.run(2, *CPU, "--scheduler-file", file, script)
    assert_refused(result, str(file), address, "still answers")
    assert file.read_text() == content(address)
    assert (keys / "ca.pem").exists()


def test_scheduler_file_in_a_folder_that_does_not_exist(alone, script, tmp_path):
    file = tmp_path / "nowhere" / "cluster.json"
    result = alone.run(1, *CPU, "--scheduler-file", file, script)
    assert_refused(
        result, "--scheduler-file", str(file.parent), "does not exist or cannot be written"
    )


def test_scheduler_file_that_is_a_folder(alone, script, tmp_path):
    assert_refused(alone.run(1, *CPU, "--scheduler-file", tmp_path, script), str(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_scheduler_file_in_a_closed_folder(alone, script, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    result = alone.run(1, *CPU, "--scheduler-file", closed / "cluster.json", script)
    assert_refused(result, str(closed), "cannot be written")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file to another user")
def test_scheduler_file_of_another_user(alone, script, tmp_path):
    file = tmp_path / "cluster.json"
    file.write_text(content(f"tcp://127.0.0.1:{free_port()}"))
    os.chown(file, 65534, 65534)
    result = alone.run(1, *CPU, "--scheduler-file", file, script)
    assert_refused(result, str(file), "another user", "65534")
    assert file.exists()


# --- missing extras -------------------------------------------------------------------------------


def test_ucx_without_its_package(alone, script, hidden):
    env = {**pythonpath(hidden), "HIDDEN": "distributed_ucxx"}
    result = alone.run(1, *CPU, "--protocol", "ucx", script, env=env)
    assert_refused(result, "--protocol ucx", "distributed_ucxx", 'pip install "cupy-cuda1')


def test_gpu_without_cuda_packages(alone, script, hidden):
    env = {**pythonpath(hidden, FAKES), **gpus(2), "HIDDEN": "cuda"}
    result = alone.run(1, *RUN, script, env=env)
    assert_refused(result, "cuda-bindings", "GPU", 'pip install "cupy-cuda1')


def test_launcher_that_needs_mpi4py_without_it(alone, script, hidden):
    env = {**pythonpath(hidden), "HIDDEN": "mpi4py", "JSM_NAMESPACE_RANK": "0"}
    assert_refused(alone.run(1, *CPU, script, env=env), "mpi4py", 'pip install "mpi4py')


def test_several_nodes_of_mpich_without_mpi4py(mpich, private, script, hidden):
    """Its nodes have nothing in common by which ranks could find a file of their launch."""
    mpich.prefix += ["-launcher", "fork", "-hosts", "a,b", "-ppn", "1"]
    env = {**pythonpath(hidden), "HIDDEN": "mpi4py"}
    options = ("--timeout", f"{stretched(8)}s", script)
    result = with_folders(mpich, private).run(2, *CPU, *options, env=env)
    assert_refused(result, "mpi4py", 'pip install "mpi4py', nodes=2)


# --- nothing is left, also while it still waits ---------------------------------------------------


def test_refusal_while_a_rank_still_starts(mpirun, script, tmp_path):
    """Rank 0 finds bad input at once; a rank that is slow to start must not wait for --timeout."""
    slow = 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then sleep 2; fi; exec "$@"'
    started = clock()
    result = mpirun.run(2, "sh", "-c", slow, "sh", *CPU, "nowhere.py", cwd=tmp_path)
    assert_refused(result, "nowhere.py")
    assert clock() - started < 20
    assert not [process for process in mpirun.leftovers() if name_of(process) == "sleep"]
