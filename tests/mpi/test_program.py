"""The program runs as with plain python, and its workers as it asked for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("site", "form"),
    [("openmpi", form) for form in ("script", "-m module", "-m package", "folder", "zip", "link")]
    + [("alone", "script"), ("alone", "-m module")],
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
    command += ["-x", "--device", "a b", "-m"]
    plain = subprocess.run(
        [sys.executable, *command],
        cwd=site.folder,
        env={**site.launcher.env, **site.env, "READ_STDIN": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = found_in(plain.stdout, "facts")
    got = facts_of(site.run(*command, find=False))
    differing = [
        f"{name}: {got[name]}\nplain python: {wanted[name]}"
        for name in wanted
        if got[name] != wanted[name]
    ]
    assert not differing, "\n".join(differing)


ERRORS = {
    "raise": "def f():\n    raise ValueError('why')\n\nf()\n",
    "chain": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError(2, 'x') from e\n",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\n",
    "syntax": "x = 1\nif x\n    pass\n",
    "import": "import no_such_module\n",
    "exit": "import sys\n\nsys.exit(['a', 'list'])\n",
    "hook": "import sys\n\nsys.excepthook = lambda *e: print('hook', e[1])\nraise ValueError(3)\n",
    "thread": "import threading\n\nthreading.Thread(target=lambda: 1 / 0).start()\n",
    "atexit": "import atexit\n\natexit.register(print, 'at exit')\nraise SystemExit(4)\n",
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
    run = site.start("facts.py", env={"READ_STDIN": "1"}, stdin=subprocess.PIPE)
    run.type("first line\nsecond\n")
    run.process.stdin.close()
    assert facts_of(run.end())["stdin"] == "first line\nsecond\n"


@under("openmpi", "mpich", "alone")
def test_it_reads_a_line_and_its_output_is_complete(site: Site):
    run = site.start("talks.py", stdin=subprocess.PIPE)
    run.type("typed\n")
    ended = run.end()
    assert ended.code == 0, str(ended)
    first, *lines, last = ended.out.split("\n")
    assert first == "heard typed"
    assert [line[:11] for line in lines] == [f"line {number:6d}" for number in range(100_000)]
    assert last == "the end, without a new line"


def test_limits_of_threads_that_the_user_set_stay(site: Site):
    facts = facts_of(site.run("facts.py", env={"OMP_NUM_THREADS": "2"}))
    assert facts["limits of threads"] == {"OMP_NUM_THREADS": "2"}


# With the cluster


@under("openmpi", "mpich", "alone")
def test_a_program_without_a_guard_uses_the_cluster_in_many_ways(site: Site):
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
        "from a child": 7,
        "second client": 3,
        "module beside the script": 9,
    }
    assert not ended.foreign_lines, str(ended)
    site.check_nothing_left(ended.program_end)


def test_a_module_s_neighbours_reach_the_workers(site: Site):
    shutil.copytree(PROGRAMS, site.folder / "programs")
    shutil.copy(PROGRAMS / "common.py", site.folder)
    shutil.copy(PROGRAMS / "neighbour.py", site.folder)
    ended = site.run("-m", "programs.work", find=False)
    assert ended.code == 0, str(ended)
    assert found_in(ended.out, "found")["module beside the script"] == 9


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
    ended = site.run(
        *("--resources", "TEST=2 MEM=1e9", "--name", "given", "--lifetime", "1h"),
        *("--lifetime-stagger", "1s", "--nthreads", "3", "--memory-limit", "512MiB"),
        *("--preload", site.folder / "preloaded.py", "options.py"),
    )
    assert ended.code == 0, str(ended)
    found = found_in(ended.out, "found")
    assert found["names"] == ["given-0", "given-1"]
    assert found["resources"] == [{"TEST": 2.0, "MEM": 1e9}] * 2
    for worker in found["workers"]:
        assert abs(worker["lifetime"] - 3600) <= 1
        assert worker["threads"] == 3
        assert worker["memory"] == 512 * 2**20
        assert worker["preloaded"] == "BoundWorker"
    assert found["nannies"] == [None, None]


def test_preload_nanny_and_local_directory(site: Site):
    (site.folder / "preloaded.py").write_text(PRELOADED)
    scratch = site.folder / "scratch"
    run = site.start(
        *("--local-directory", scratch, "--preload-nanny", "preloaded", "options.py"),
        env={"PYTHONPATH": f"{site.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    run.wait_for(lambda: scratch.exists() and len(list(scratch.iterdir())) == 2, "two folders")
    ended = run.end()
    assert ended.code == 0, str(ended)
    assert found_in(ended.out, "found")["nannies"] == ["BoundNanny"] * 2
    site.check_nothing_left(ended.at)
    assert not list(scratch.iterdir())


@under("openmpi", "alone")
@pytest.mark.parametrize("tls", ["--tls", "--no-tls"])
def test_on_one_node_everything_listens_on_loopback(site: Site, tls: str):
    parts = facts_of(site.run(tls, "sockets.py"))
    assert len(parts) == 5  # two workers, their nannies, the scheduler
    assert all(addresses == ["127.0.0.1"] for addresses in parts), parts


@under("alone")
def test_a_cluster_without_workers_says_so(site: Site):
    run = site.start("retires.py", stdin=subprocess.PIPE)
    run.line("retired")
    run.line("hpcdask: no worker is left", stream="err", timeout=20)
    run.type("end\n")
    assert run.end().code == 0


@under("openmpi", "alone")
def test_workers_get_the_environment_that_dask_s_configuration_asks_for(site: Site):
    folder = site.folder / ".config" / "dask"
    folder.mkdir(parents=True)
    (folder / "nanny.yaml").write_text(
        "distributed:\n  nanny:\n    pre-spawn-environ:\n      OMP_NUM_THREADS: 4\n"
    )
    assert facts_of(site.run("threads.py")) == [["4"], None]
