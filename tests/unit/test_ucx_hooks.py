"""UCX's hooks into memory functions: installed early, by one thread, without waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from launching import needs

pytestmark = needs("distributed_ucxx")

START = """
import ctypes, os, sys, threading
from hpcdask.comm import ucx_config

mmap = ctypes.cast(ctypes.CDLL(None).mmap, ctypes.c_void_p).value

def code():
    return ctypes.string_at(mmap, 5)

def loaded():
    return "libucs.so" in open("/proc/self/maps").read()

plain = code()
"""


def run(body: str, **environment: str) -> None:
    """Run a program whose every assertion holds, and which says nothing."""
    done = subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(body)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_has_them_and_ucx_starts_there():
    run(
        """
        ucx_config.install()
        hooked = code()
        assert loaded() and hooked != plain
        assert ucx_config.GRACE not in os.environ  # for what is not hooked, UCX waits as ever
        assert os.environ["UCX_LOG_FILE"] == "stderr"  # UCX has read it by now
        if pid := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        from hpcdask.upstream import ucxx
        ucxx.start()
        assert code() == hooked
        """
    )


def test_none_where_another_thread_may_be_in_a_function():
    run(
        """
        stop = threading.Event()
        threading.Thread(target=stop.wait).start()
        ucx_config.install()
        assert not loaded() and code() == plain
        stop.set()
        """
    )
