"""The program runs as with plain python, and its workers as it asked for them."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launching import wait_for
from running import PROGRAMS, Ended, Site

pytestmark = pytest.mark.mpi


def under(*launchers: str):
    """Run the test under these launchers."""
    return pytest.mark.parametrize("site", launchers, indirect=True)


def found_in(text: str, start: str) -> dict:
    lines = [line for line in text.splitlines() if line.startswith(f"{start} ")]
    assert len(lines) == 1, text[-4000:]
    return json.loads(lines[0].removeprefix(start))


def facts_of(ended: Ended) -> dict:
    assert ended.code == 0, str(ended)
    assert not ended.foreign_lines, str(ended)
    return found_in(ended.out, "facts")


# As with plain python


@pytest.fixture
def package(site: Site) -> Path:
    """The package `pack` in the site's folder: module `pack.facts`, and `pack` itself."""
    folder = site.folder / "pack"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(PROGRAMS / "facts.py", folder / "facts.py")
    shutil.copy(PROGRAMS / "facts.py", folder / "__main__.py")
    return folder


def facts_of_a_rank(site: Site) -> dict | None:
    """What a rank sees without hpcdask; now and then mpirun loses what a short program prints."""
    ended = site.launcher.run(1, "python", PROGRAMS / "facts.py", env={"READ_STDIN": "0"})
    assert ended.code == 0, ended.err
    return found_in(ended.out, "facts") if ended.out else None


POOL_PROGRAM = """
import subprocess, sys
from concurrent.futures import ProcessPoolExecutor
from distributed import Client
def initialized(number):
    from mpi4py import MPI
    return MPI.COMM_WORLD.size
if __name__ == "__main__":
    Client()
    with ProcessPoolExecutor(2) as pool:
        print(*pool.map(initialized, range(2)))
    if len(sys.argv) > 1:
        code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
        told = subprocess.run([*sys.argv[1:], "-n", "2", sys.executable, "-c", code],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        print(*"".join(told.stdout.split()), told.stderr)  # their lines may mix
"""


@pytest.mark.parametrize("site", ["openmpi", "mpich"], indirect=True)
def test_a_pool_does_not_start_mpi_and_an_mpiexec_does(site: Site):
    """By every Python's own start method, which from 3.14 on is a new Python."""
    (site.folder / "pools.py").write_text(POOL_PROGRAM)
    # Open MPI does not promise to start one mpirun from another
    inner = site.launcher.prefix if site.launcher.name == "MPICH" else []
    ended = site.run("pools.py", *inner, find=False, timeout=90)
    assert ended.code == 0, str(ended)
    assert ended.out.split() == ["1", "1", *(["2", "2"] if inner else [])], str(ended)
    site.check_nothing_left(ended.at)


@pytest.mark.parametrize(
    ("site", "form"),
    [("openmpi", "script"), ("openmpi", "-m module"), ("alone", "-m package"), ("alone", "zip")]
    + [
        pytest.param("alone", form, marks=pytest.mark.long)
        for form in ("folder", "link", "compiled")
    ],
    indirect=["site"],
)
def test_the_program_sees_what_it_sees_under_plain_python(site: Site, package: Path, form: str):
    match form:
        case "script":
            shutil.copy(PROGRAMS / "facts.py", package.parent / "script.py")
            command = ["pack/../script.py"]
        case "-m module":
            command = ["-m", "pack.facts"]
        case "-m package":
            command = ["-m", "pack"]
        case "folder":
            command = ["pack"]
        case "zip":
            shutil.make_archive(str(site.folder / "pack"), "zip", package)
            command = ["pack.zip"]
        case "link":
            (site.folder / "linked").symlink_to(package / "facts.py")
            command = ["linked"]
        case "compiled":
            py_compile.compile(str(package / "facts.py"), str(site.folder / "facts.pyc"))
            command = ["facts.pyc"]
    command += ["-x", "--device", "a b", "-m"]
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
    wanted = found_in(plain.stdout, "facts")
    if site.launcher.name == "Open MPI":  # gives its ranks a terminal for standard output
        wanted["buffered"] = wait_for(lambda: facts_of_a_rank(site), 60)["buffered"]
    got = facts_of(site.run(*command, find=False))
    differing = [
        f"{name}: {got[name]}\nplain python: {wanted[name]}"
        for name in wanted
        if got[name] != wanted[name]
    ]
    assert not differing, "\n".join(differing)


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
    ended = site.run(*words, find=False, runner=["hpcdask", "run"])
    rank = ["-m", "hpcdask.run", "--device", "cpu", *words]
    assert (ended.code, ended.out.strip()) == (3, f"2 {words[2:]} {rank}"), str(ended)
    site.check_nothing_left(ended.at)


@under("alone")
def test_a_program_may_come_through_a_pipe(site: Site):
    os.mkfifo(site.folder / "pipe")
    text = "from distributed import Client\nprint(Client().submit(abs, -2).result())\n"
    writer = threading.Thread(target=(site.folder / "pipe").write_text, args=(text,))
    writer.start()
    ended = site.run("pipe", find=False)
    writer.join()
    assert (ended.code, ended.out) == (0, "2\n"), str(ended)


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
    "syntax": "x = 1\nif x\n    pass\n",
    "exit": "import sys\n\nsys.exit(['a', 'list'])\n",
    "hook": "import sys\n\nsys.excepthook = lambda *e: print('hook', e[1])\nraise ValueError(3)\n",
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
@pytest.mark.parametrize("error", ERRORS)
def test_errors_look_as_under_plain_python(site: Site, error: str):
    script = site.folder / "script.py"
    script.write_text(ERRORS[error])
    plain = subprocess.run(
        [sys.executable, "script.py"], cwd=site.folder, capture_output=True, text=True, check=False
    )
    ended = site.run("script.py", find=False)
    assert "\n".join(ended.foreign_lines) == plain.stderr.removesuffix("\n")
    assert (ended.out, ended.code) == (plain.stdout, plain.returncode)


@under("mpich", "alone")
def test_standard_input_reaches_the_program_to_its_end(site: Site):
    env = {"READ_STDIN": "1", "OMP_NUM_THREADS": "2"}
    run = site.start("facts.py", env=env, stdin=subprocess.PIPE)
    run.type("first line\nsecond\n")
    run.process.stdin.close()
    facts = facts_of(run.end())
    assert facts["stdin"] == "first line\nsecond\n"
    assert facts["limits of threads"] == {"OMP_NUM_THREADS": "2"}  # the user's own stay


@under("openmpi", "mpich")
def test_it_reads_a_line_and_its_output_is_complete(site: Site):
    run = site.start("talks.py", stdin=subprocess.PIPE)
    run.type("typed\n")
    ended = run.end()
    assert ended.code == 0, str(ended)
    first, *lines, last = ended.out.split("\n")
    assert first == "heard typed"
    assert [line[:11] for line in lines] == [f"line {number:6d}" for number in range(100_000)]
    assert last == "the end, without a new line"


# With the cluster


SLOW_WORKER = """
import time
def dask_setup(worker):
    if worker.name.endswith("-1"):
        time.sleep(2)
"""


def test_it_starts_when_all_workers_are_there(site: Site):
    (site.folder / "slow.py").write_text(SLOW_WORKER)
    (site.folder / "count.py").write_text(
        "from distributed import Client\nprint(len(Client().nthreads()))"
    )
    ended = site.run("--preload", "slow.py", "count.py", find=False)
    assert ended.code == 0, str(ended)
    assert ended.out == "2\n"


MPI_PROGRAM = """
from distributed import Client
from mpi4py import MPI  # as a library of the program may
def initialized():
    from mpi4py import MPI
    return MPI.COMM_WORLD.size
print(MPI.COMM_WORLD.size, *Client().run(initialized).values())
"""


@pytest.mark.parametrize("site", ["openmpi", "mpich"], indirect=True)
def test_importing_mpi4py_does_not_wait_for_the_other_ranks(site: Site):
    (site.folder / "imports.py").write_text(MPI_PROGRAM)
    ended = site.run("imports.py", find=False, timeout=30)
    assert ended.code == 0, str(ended)
    assert ended.out == "1 1 1\n"


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
        shutil.copy(PROGRAMS / "common.py", site.folder)
        shutil.copy(PROGRAMS.parents[1] / "clock.py", site.folder)
        shutil.copy(PROGRAMS / "neighbour.py", site.folder)
        ended = site.run("-m", "programs.work", find=False)
    else:
        ended = site.run("work.py")
    assert ended.code == 0, str(ended)
    assert ended.out.count("top level") == 1, str(ended)
    found = found_in(ended.out, "found")
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
    site.check_nothing_left(ended.program_end)


def test_a_program_may_spawn_and_fork(site: Site):
    ended = site.run("spawns.py")
    assert ended.code == 0, str(ended)
    assert found_in(ended.out, "found") == {
        "spawn": [0, 1, 4, 9],
        "other": True,
        "fork": [0, 1, 4],
        "cluster": [0, 1, 4],
    }
    site.check_nothing_left(ended.at)


# Options of the workers

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
    assert ended.code == 0, str(ended)
    found = found_in(ended.out, "found")
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


def test_preload_nanny_and_local_directory(site: Site):
    (site.folder / "preloaded.py").write_text(PRELOADED)
    scratch = site.folder / "scratch"
    run = site.start(
        *("--local-directory", scratch, "--preload-nanny", "preloaded", "--no-tls", "options.py"),
        env={"PYTHONPATH": f"{site.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    run.wait_for(lambda: scratch.exists() and len(list(scratch.iterdir())) == 2, "two folders")
    ended = run.end()
    assert ended.code == 0, str(ended)
    found = found_in(ended.out, "found")
    assert found["nannies"] == ["BoundNanny"] * 2
    check_all_on_loopback(found)
    site.check_nothing_left(ended.at)
    assert not list(scratch.iterdir())


def check_all_on_loopback(found: dict) -> None:
    """On one node nothing listens elsewhere, with TLS or without."""
    assert len(found["sockets"]) == 5  # two workers, their nannies, the scheduler
    assert all(addresses == ["127.0.0.1"] for addresses in found["sockets"]), found


@under("alone")
def test_a_cluster_without_workers_says_so(site: Site):
    run = site.start("retires.py", stdin=subprocess.PIPE)
    assert all(addresses == ["127.0.0.1"] for addresses in json.loads(run.line("listens")))
    run.line("retired")
    run.line("hpcdask: no worker is left", stream="err", timeout=20)
    run.type("end\n")
    assert run.end().code == 0
