"""The template stands on private parts of Python: what differs, moves or hangs is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SETUP = """
import multiprocessing, os, signal, sys, tempfile, time
from multiprocessing import forkserver as mp_forkserver
from hpcdask.node import forkserver

if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    start = multiprocessing.get_context("forkserver").Process(target=os.getpid).start
"""


def run(folder: Path, body: str) -> None:
    """Run a program, which is to end well."""
    path = folder / "parent.py"
    path.write_text(SETUP + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    done = subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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


ENDED = """
forkserver.start(folder, lambda: os._exit(0))
os.waitid(os.P_PID, mp_forkserver._forkserver._forkserver_pid, os.WEXITED | os.WNOWAIT)
start()
"""


def test_python_s_own_takes_the_place_of_a_template_that_has_ended(tmp_path):
    run(tmp_path, ENDED)
