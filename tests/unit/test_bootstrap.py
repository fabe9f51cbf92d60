"""The janitor, and how a rank ends: what no run of a test can bring about."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from hpcdask.process import process_start
from launching import wait_for


def python(code: str, *arguments: str | os.PathLike[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(os.fspath, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


RANK_THAT_LEAVES_A_PROCESS = """
    import os, sys
    from hpcdask.bootstrap import janitor

    janitor.KILL_DEADLINE_S = 3
    janitor.marked_processes = lambda *_: [2**22]  # as if it could not be killed
    janitor = janitor.Janitor.start("nobody")
    now, later, forgotten = sys.argv[1:]
    janitor.remove_at_once(now)
    janitor.remove_at_end(later)
    janitor.remove_at_once(forgotten)
    janitor.forget(forgotten)
    print(janitor.pid, flush=True)
    os._exit(0)
"""


def test_what_another_cluster_may_write_anew_is_removed_at_once(tmp_path: Path):
    """The scheduler file of a second run went when the first one's processes had ended."""
    now, forgotten = tmp_path / "cluster.json", tmp_path / "other.json"
    later = tmp_path / os.fsdecode(b"caf\xe9")
    for path in (now, later, forgotten):
        path.write_text("")
    rank = python(RANK_THAT_LEAVES_A_PROCESS, now, later, forgotten)
    assert rank.wait(60) == 0
    janitor = int(rank.stdout.readline())
    wait_for(lambda: not now.exists(), 2, "the file to be removed")
    assert later.exists()
    now.write_text("of the next cluster")
    wait_for(lambda: not later.exists(), 10, "the folder to be removed")
    wait_for(lambda: not psutil.pid_exists(janitor), 10, "the janitor to end")
    assert now.exists()
    assert forgotten.exists()


STREAM_WHOSE_NUMBER_A_LIBRARY_HAS = """
    import os, sys

    os.close(0)
    if sys.argv[1] == "taken":
        assert os.open("/proc/self/exe", os.O_RDONLY) == 0
    from hpcdask.bootstrap.environment import open_standard_streams

    open_standard_streams()
    code = "import os, sys; print(sys.stdin is None or os.readlink('/proc/self/fd/0'))"
    os.execv(sys.executable, [sys.executable, "-c", code])
"""


@pytest.mark.parametrize("number", ["free", "taken"])
def test_a_stream_that_was_closed_is_there_in_the_next_life(number: str):
    """Also where a library keeps a file open, as libffi does, which gets the stream's number."""
    next_life = python(STREAM_WHOSE_NUMBER_A_LIBRARY_HAS, number)
    out, _ = next_life.communicate(timeout=60)
    assert out.strip() == os.devnull


def test_a_process_whose_end_nobody_has_asked_for_is_gone():
    """A zombie has given back its memory, and runs no more."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_start(pid) == ""
    os.waitpid(pid, 0)
    assert process_start(os.getpid())
