"""The janitor, and how a rank ends: what no run of a test can bring about."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil

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
    janitor = janitor.Janitor("nobody")
    for path in sys.argv[1:]:
        janitor.remove_at_end(path)
    print(janitor.pid, flush=True)
    os._exit(0)
"""


def test_what_another_cluster_may_write_anew_is_removed_at_once(tmp_path: Path):
    """The scheduler file of a second run went when the first one's processes had ended."""
    now, later = tmp_path / "cluster.json", tmp_path / os.fsdecode(b"caf\xe9")
    now.write_text("")
    later.mkdir()
    rank = python(RANK_THAT_LEAVES_A_PROCESS, now, later)
    assert rank.wait(60) == 0
    janitor = int(rank.stdout.readline())
    wait_for(lambda: not now.exists(), 2, "the file to be removed")
    assert later.exists()
    now.write_text("of the next cluster")
    wait_for(lambda: not later.exists(), 10, "the folder to be removed")
    wait_for(lambda: not psutil.pid_exists(janitor), 10, "the janitor to end")
    assert now.exists()
