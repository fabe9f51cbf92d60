"""What UCX has mapped of other processes' memory, and letting go of it once they have ended.

The library is a stand-in with the table of UCX 1.21; tests/gpu has the real one.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdask.comm import cuda_ipc
from hpcdask.comm.cuda_ipc import Mappings, own_namespace, release_of_the_dead
from hpcdask.process import process_start as start
from launching import unavailable, until

STAND_IN = """
#include <cstdint>
#include <cstdlib>
struct key { int pid; unsigned long ns; int device; };
struct table {
    uint32_t buckets, size, occupied, bound, *flags;
    key *keys;
    void **values;
};
static uint32_t flags[1];
static key keys[4];
static void *values[4];
extern "C" {
table uct_cuda_ipc_remote_cache = {0, 0, 0, 0, flags, keys, values};
int destroyed = 0;
int uct_cuda_ipc_create_cache(void **made, const char *) { *made = malloc(1); return 0; }
void uct_cuda_ipc_destroy_cache(void *cache) { destroyed++; free(cache); }
// buckets 1 and 3 are taken, 0 is empty, 2 was deleted
void fill(int pid, int other, unsigned long ns) {
    uct_cuda_ipc_remote_cache.buckets = 4;
    uct_cuda_ipc_remote_cache.size = 2;
    flags[0] = 2u | 0u << 2 | 1u << 4 | 0u << 6;
    keys[1] = {pid, ns, 0};
    keys[2] = {1, ns, 0};
    keys[3] = {other, ns, 0};
    values[1] = malloc(1);
    values[3] = malloc(1);
}
}
"""


@pytest.fixture
def library(tmp_path: Path) -> Iterator[ctypes.CDLL]:
    """Loaded into this process, as UCX loads its own."""
    source, built = tmp_path / "table.cc", tmp_path / cuda_ipc.LIBRARY
    source.write_text(STAND_IN)
    try:
        subprocess.run(
            ["g++", "-shared", "-fPIC", f"-Wl,-soname,{cuda_ipc.LIBRARY}", "-o", built, source],
            check=True,
        )
    except FileNotFoundError:
        unavailable("g++ is not here")
    loader = ctypes.CDLL(None)
    loader.dlopen.restype = ctypes.c_void_p
    handle = loader.dlopen(str(built).encode(), os.RTLD_NOW)
    yield ctypes.CDLL(str(built), handle=handle)
    loader.dlclose(ctypes.c_void_p(handle))


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


async def test_memory_of_a_process_that_ends_is_let_go_of(library, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(cuda_ipc, "synchronize", lambda: None)
    looked: list[int] = []
    monkeypatch.setattr(cuda_ipc, "process_start", lambda pid: looked.append(pid) or start(pid))
    mappings, turns = Mappings((1, 21, 0)), []
    assert mappings.processes() == set()
    destroyed = ctypes.c_int.in_dll(library, "destroyed")

    async def both_looked_at() -> None:
        looked.clear()
        await until(lambda: {ending.pid, living.pid} <= set(looked[:-2]))

    with sleeper() as ending, sleeper() as living:
        library.fill(ending.pid, living.pid, ctypes.c_ulong(own_namespace()))
        both = {(ending.pid, own_namespace()), (living.pid, own_namespace())}
        assert mappings.processes() == both
        watching = asyncio.create_task(release_of_the_dead(mappings, lambda: turns.append(None)))
        await both_looked_at()
        assert destroyed.value == 0
        ending.kill()
        ending.wait()
        await until(lambda: destroyed.value)
        await both_looked_at()  # which leaves it at that, and the living alone
        assert destroyed.value == 1
        assert len(turns) == cuda_ipc.PROGRESS_TURNS
        watching.cancel()
        living.kill()


@pytest.mark.parametrize("version", [(1, 20, 1), (1, 22, 0)])
async def test_other_versions_of_ucx_are_left_alone(library, version):
    library.fill(1, 2, ctypes.c_ulong(3))
    assert Mappings(version).processes() == set()
    await release_of_the_dead(Mappings(version), print)  # ends at once
