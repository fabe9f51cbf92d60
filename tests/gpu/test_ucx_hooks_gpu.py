"""UCX's hooks into memory functions, installed before CUDA starts and in another process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcdask.gpu.devices import Gpu

pytestmark = pytest.mark.gpu

HOOKED = """
import ctypes, os, sys
from hpcdask.comm import ucx_config

def code():
    driver = ctypes.CDLL("libcuda.so.1")
    return ctypes.string_at(ctypes.cast(driver.cuMemFree_v2, ctypes.c_void_p).value, 12)

before = code()
ucx_config.install()
assert code() != before
if pid := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
assert code() != before
freed = []
@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
def note(event, details, argument):
    freed.append(event)
only_listen = 1 << 24
assert ctypes.CDLL("libucm.so.0").ucm_set_event_handler(1 << 21 | only_listen, 0, note, None) == 0
import cupy
memory = cupy.cuda.Memory(2**20)
assert not freed
del memory
assert freed == [1 << 21], freed
"""


def test_hooks_from_before_a_fork_tell_of_freed_device_memory(gpus: list[Gpu]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
