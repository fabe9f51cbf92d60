"""The template stands on private parts of Python: what differs, moves or hangs is told."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
from multiprocessing import forkserver as mp_forkserver
from pathlib import Path

import pytest

from hpcdask.bootstrap import ranks
from hpcdask.node import forkserver
from launching import needs

SERVER = mp_forkserver._forkserver
SETUP = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import forkserver as mp_forkserver
from hpcdask.node import forkserver

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    start = multiprocessing.get_context("forkserver").Process(target=os.getpid).start
"""


def run(folder: Path, body: str, *arguments: str) -> str:
    """What a program says; it is to end well."""
    path = folder / "parent.py"
    path.write_text(SETUP + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    done = subprocess.run(
        [sys.executable, path, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


KEYED = """
def main(listener, alive, preload, *, authkey_r):
    with open(f"{folder}/key", "wb") as file:
        file.write(os.read(authkey_r, 99))
mp_forkserver.main = main
mp_forkserver._forkserver._forkserver_authkey = None
forkserver.start(folder, lambda: None)
os.waitpid(mp_forkserver._forkserver._forkserver_pid, 0)
key = mp_forkserver._forkserver._forkserver_authkey
assert len(key) == 32 and key == open(f"{folder}/key", "rb").read()
"""


def test_the_fork_server_and_who_asks_it_have_the_same_key(tmp_path):
    """On every Python, with a main function like that of 3.14."""
    run(tmp_path, KEYED)


FAILING = """
forkserver._deadline_s = 1.0 if sys.argv[1] == "hangs" else 200.0
fail = {"hangs": lambda: time.sleep(1000), "ends": lambda: os._exit(0), "goes on": lambda: None}
forkserver.start(folder, fail[sys.argv[1]])
template = mp_forkserver._forkserver._forkserver_pid
if sys.argv[1] == "ends":
    os.waitid(os.P_PID, template, os.WEXITED | os.WNOWAIT)
if sys.argv[1] == "goes on":
    mp_forkserver._forkserver._forkserver_address += "-elsewhere"
try:
    start()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
if sys.argv[1] == "hangs":
    os.kill(template, signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("hangs", r"ClusterError: the template on \S+, of .* has not answered for 1 s\..*"),
        ("goes on", r"ClusterError: the template on \S+, .* failed \(FileNotFoundError: .*"),
        ("ends", ""),  # there is Python's own in its place
    ],
)
def test_a_template_that_does_not_answer_is_named(tmp_path, fault, told):
    assert re.fullmatch(told, run(tmp_path, FAILING, fault))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("alone", [False, True])
def test_pools_leave_mpi_alone_where_the_program_does(monkeypatch, method, alone):
    """Where they start from a new Python, and only there."""
    methods = [method, "spawn"]
    monkeypatch.setattr(SERVER, "_preload_modules", ["__main__"])
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    monkeypatch.setattr(ranks, "leaves_mpi_alone", lambda: not alone)
    forkserver._keep_pools_off_mpi()
    off = method == "forkserver" and not alone
    assert SERVER._preload_modules == (["hpcdask.bootstrap.mpi_off"] if off else ["__main__"])


@needs("mpi4py")
def test_what_pools_import_first_is_there_and_knows_the_launcher():
    code = "import hpcdask.bootstrap.mpi_off; from hpcdask.bootstrap import ranks; "
    code += "print(ranks.leaves_mpi_alone())"
    for size, told in (("2", "True"), ("1", "False")):
        world = {
            f"OMPI_COMM_WORLD_{name}": number
            for name, number in {
                "RANK": "0",
                "SIZE": size,
                "LOCAL_RANK": "0",
                "LOCAL_SIZE": size,
            }.items()
        }
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **world},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.strip() == told
