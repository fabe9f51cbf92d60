"""The program runs as with plain python, and its workers as it asked for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from launching import wait_for
from running import PROGRAMS, Ended, Site, under

pytestmark = pytest.mark.mpi


def facts_of(ended: Ended) -> dict:
    assert not ended.foreign_lines, str(ended)
    return ended.told("facts")


# As with plain python


def buffered_in_a_rank(site: Site) -> list[bool] | None:
    """What a rank sees without hpcdask; now and then mpirun loses what a short program prints."""
    run = site.popen("python", PROGRAMS / "facts.py", env={"READ_STDIN": "0"})
    done = run.end(code=0)
    return json.loads(done.out.removeprefix("facts"))["buffered"] if done.out else None


@pytest.mark.parametrize(
    ("site", "command"),
    [
        ("openmpi", ["pack/../script.py"]),
        ("alone", ["-m", "pack.facts"]),
        pytest.param("alone", ["pack.zip"], marks=pytest.mark.long),
    ],
    indirect=["site"],
)
def test_the_program_sees_what_it_sees_under_plain_python(site: Site, command: list[str]):
    folder = site.folder / "pack"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("facts.py", "__main__.py", "../script.py"):
        shutil.copy(PROGRAMS / "facts.py", folder / name)
    shutil.make_archive(str(folder), "zip", folder)
    command = [*command, "-x", "--device", "a b", "-m"]
    hangup = ["env", "--default-signal=HUP"]  # as mpirun, where the tests run under nohup
    plain = subprocess.run(
        [*(hangup if site.launcher.name == "Open MPI" else []), sys.executable, *command],
        cwd=site.folder,
        env={**site.launcher.env, **site.env, "READ_STDIN": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = json.loads(plain.stdout.removeprefix("facts"))
    if site.launcher.name == "Open MPI":  # gives its ranks a terminal for standard output
        wanted["buffered"] = wait_for(lambda: buffered_in_a_rank(site), 60)
    assert facts_of(site.run(*command)) == wanted


@under("openmpi", "mpich")
def test_hpcdask_run_becomes_the_runner(site: Site):
    """Each rank is ``python -m hpcdask.run``, with the words as they stand on the command line."""
    (site.folder / "shows.py").write_text(
        "import os, sys\n"
        "from distributed import Client\n"
        "rank = open(f'/proc/{os.getppid()}/cmdline').read().split(chr(0))[:-1]\n"
        "with Client() as client:\n"
        "    print(len(client.nthreads()), sys.argv[1:], rank[rank.index('-m') :], flush=True)\n"
        "sys.exit(3)\n"
    )
    words = ["--nthreads=1", "shows.py", "--", "--help", "-m"]
    ended = site.run(*words, runner=["hpcdask", "run"], code=3)
    rank = ["-m", "hpcdask.run", "--device", "cpu", *words]
    assert ended.out.strip() == f"2 {words[2:]} {rank}", str(ended)
    site.check_nothing_left()


#: A program each; what one can show of several is in one.
ERRORS = {
    "raise": """
def f():
    try:
        1 / 0
    except ZeroDivisionError as e:
        raise ExceptionGroup('two', [ValueError(1), OSError(2, 'x')]) from e

f()
""",
    "late": """
import atexit, threading

atexit.register(print, 'at exit')
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise SystemExit(4)
""",
}


@under("alone")
@pytest.mark.parametrize("error", ["raise", pytest.param("late", marks=pytest.mark.long)])
def test_errors_look_as_under_plain_python(site: Site, error: str):
    run = site.start(program=ERRORS[error])
    plain = subprocess.run(
        [sys.executable, "program.py"], cwd=site.folder, capture_output=True, text=True, check=False
    )
    ended = run.end(code=plain.returncode)
    assert "\n".join(ended.foreign_lines) == plain.stderr.removesuffix("\n")
    assert ended.out == plain.stdout


@under("mpich", "alone")
def test_standard_input_reaches_the_program_to_its_end(site: Site):
    env = {"READ_STDIN": "1", "OMP_NUM_THREADS": "2"}
    run = site.start("facts.py", env=env, stdin=subprocess.PIPE)
    run.type("first line\nsecond\n")
    run.process.stdin.close()
    facts = facts_of(run.end(code=0))
    assert facts["stdin"] == "first line\nsecond\n"
    assert facts["limits of threads"] == {"OMP_NUM_THREADS": "2"}  # the user's own stay


# With the cluster


SLOW_WORKER = """
import time
def dask_setup(worker):
    if worker.name.endswith("-1"):
        time.sleep(2)
"""


def test_it_starts_when_all_workers_are_there(site: Site):
    (site.folder / "slow.py").write_text(SLOW_WORKER)
    program = "from distributed import Client\nprint(len(Client().nthreads()))"
    assert site.run("--preload", "slow.py", program=program).out == "2\n"


@pytest.mark.parametrize(
    ("site", "form"),
    [
        ("openmpi", "script"),
        pytest.param("mpich", "module", marks=pytest.mark.long),
        pytest.param("alone", "script", marks=pytest.mark.long),
    ],
    indirect=["site"],
)
def test_a_program_without_a_guard_uses_the_cluster_in_many_ways(site: Site, form: str):
    """As a module of a package too: its neighbours, in the working folder, reach the workers."""
    if form == "module":
        shutil.copytree(PROGRAMS, site.folder / "programs")
        for name in ("common.py", "neighbour.py", "../../clock.py"):
            shutil.copy(PROGRAMS / name, site.folder)
        ended = site.run("-m", "programs.work")
    else:
        ended = site.run("work.py")
    assert ended.out.count("top level") == 1, str(ended)
    found = ended.told("found")
    assert found.pop("workers") == 2 or site.launcher.name == "no launcher"
    assert found == {
        "submit": 2,
        "map": [0, 2, 4],
        "delayed": 2,
        "array": 4950,
        "remote": True,
        "second client": 3,
        "held back": 0,
        "module beside the script": 9,
    }
    assert not ended.foreign_lines, str(ended)
    site.check_nothing_left()


def test_modules_in_a_folder_that_the_program_adds_reach_the_workers(site: Site):
    (site.folder / "src").mkdir()
    (site.folder / "src" / "inlib.py").write_text("def f(x):\n    return x + 1\n")
    program = (
        "import sys\nsys.path.insert(0, 'src')\nimport inlib\nfrom distributed import Client\n"
        "client = Client()\nprint(client.gather(client.map(inlib.f, range(4))))\n"
    )
    assert site.run(program=program).out == "[1, 2, 3, 4]\n"


# Options of the workers

BLAS = """
import os
from distributed import Client

def threads():
    import numpy, threadpoolctl
    return max(pool["num_threads"] for pool in threadpoolctl.threadpool_info())

with Client() as client:
    print("threads", threads(), set(client.run(threads).values()))
"""


@under("alone")
@pytest.mark.parametrize("names", ["OMP", "OPENBLAS", "OMP OPENBLAS MKL BLIS NUMEXPR"])
def test_the_users_number_of_blas_threads_reaches_program_and_workers(site: Site, names: str):
    """Regression: workers had one where OMP_NUM_THREADS alone was set."""
    env = {f"{name}_NUM_THREADS": "2" for name in names.split()}
    assert "threads 2 {2}\n" in site.run(program=BLAS, env=env).out


PRELOADED = """
import sys

def dask_setup(server):
    sys.preloaded_for_test = type(server).__name__
"""


def test_options_arrive_at_the_workers(site: Site):
    (site.folder / "preloaded.py").write_text(PRELOADED)
    config = site.folder / ".config" / "dask" / "nanny.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("distributed:\n  nanny:\n    pre-spawn-environ:\n      OMP_NUM_THREADS: 4\n")
    ended = site.run(
        *("--resources", "TEST=2 MEM=1e9", "--name", "given", "--lifetime", "1h"),
        *("--lifetime-stagger", "1s", "--nthreads", "3", "--memory-limit", "512MiB"),
        *("--preload", site.folder / "preloaded.py", "options.py"),
    )
    found = ended.told("found")
    assert found["names"] == ["given-0", "given-1"]
    assert found["resources"] == [{"CPU": 1.0, "TEST": 2.0, "MEM": 1e9}] * 2
    for worker in found["workers"]:
        assert abs(worker["lifetime"] - 3600) <= 1
        assert worker["threads"] == 3
        assert worker["memory"] == 512 * 2**20
        assert worker["preloaded"] == "DeviceWorker"
        assert worker["OMP_NUM_THREADS"] == "4"  # as Dask's configuration asks
    assert found["nannies"] == [None, None]
    assert found["OMP_NUM_THREADS"] is None
    check_all_on_loopback(found)


@pytest.mark.long
def test_preload_nanny_and_local_directory(site: Site):
    (site.folder / "preloaded.py").write_text(PRELOADED)
    scratch = site.folder / "scratch"
    run = site.start(
        *("--local-directory", scratch, "--preload-nanny", "preloaded", "--no-tls", "options.py"),
        env={"PYTHONPATH": f"{site.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    run.wait_for(lambda: scratch.exists() and len(list(scratch.iterdir())) == 2, "two folders")
    found = run.end(code=0).told("found")
    assert found["nannies"] == ["BoundNanny"] * 2
    check_all_on_loopback(found)
    site.check_nothing_left()
    assert not list(scratch.iterdir())


def check_all_on_loopback(found: dict) -> None:
    """On one node nothing listens elsewhere, with TLS or without."""
    assert len(found["sockets"]) == 5  # two workers, their nannies, the scheduler
    assert all(addresses == ["127.0.0.1"] for addresses in found["sockets"]), found


@under("alone")
@pytest.mark.long
def test_a_cluster_without_workers_says_so(site: Site):
    run = site.start("retires.py", stdin=subprocess.PIPE)
    assert all(addresses == ["127.0.0.1"] for addresses in json.loads(run.line("listens")))
    run.line("retired")
    run.line("hpcdask: no worker is left", stream="err", timeout=20)
    run.type("end\n")
    run.end(code=0)
