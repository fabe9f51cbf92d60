"""Importing starts nothing, opens nothing, changes no signal handler, needs no CUDA and no MPI."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys

import pytest

import hpcdask

OPTIONAL = ["cuda", "cupy", "dask_cuda", "distributed_ucxx", "mpi4py", "pynvml", "rmm", "ucxx"]
MODULES = [
    "hpcdask",
    *(
        module.name
        for module in pkgutil.walk_packages(hpcdask.__path__, "hpcdask.")
        # the one module for processes that have the CUDA packages and use ucx
        if not module.name.endswith("__main__") and module.name != "hpcdask.ucx"
    ),
]
PROGRAM = """
import os, signal, sys

events = []
watched = ("socket.bind", "socket.connect", "socket.sendto", "subprocess.Popen", "os.fork")
sys.addaudithook(lambda event, args: events.append(event) if event in watched else None)

def state():
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return {
        "signals": {n: repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())},
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(os.readlink(link).startswith("socket:") for link in links
                       if os.path.islink(link)),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "children": open("/proc/self/task/%d/children" % os.getpid()).read(),
    }

BEFORE
before = state()
events.clear()
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
after = state()
import json
differences = {name: [value, after[name]] for name, value in before.items()
               if value != after[name]}
print(json.dumps({"differences": differences, "events": events, "modules": sorted(sys.modules)}))
"""


def imported(*modules: str, before: str = "") -> dict:
    """What changed when a new Python imported these modules, after `before`."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("BEFORE", before), *modules],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def test_the_package_alone_imports_next_to_nothing():
    found = imported("hpcdask")
    assert not found["differences"]
    assert not found["events"]
    loaded = {name.partition(".")[0] for name in found["modules"]}
    assert not loaded & {"dask", "distributed", "numpy", "click", "cryptography", *OPTIONAL}


def test_no_module_does_more_than_dask_does():
    """Together they are imported once; one that misbehaves is found by the next test."""
    found = imported(*MODULES, before="import distributed, dask.array, click, cryptography")
    assert not found["differences"], MODULES
    assert not found["events"]


@pytest.fixture(scope="module")
def loaded_by_dask() -> set[str]:
    """dask.array imports CuPy by itself, where it is installed."""
    return set(imported("dask.array")["modules"])


@pytest.mark.parametrize("name", MODULES)
def test_a_module_needs_no_optional_package(name, loaded_by_dask):
    found = imported(name)
    loaded = set(found["modules"])
    if "dask.array" in loaded:
        loaded -= loaded_by_dask
    assert not {module.partition(".")[0] for module in loaded} & set(OPTIONAL)
    assert not {"signals", "threads", "sockets", "children"} & set(found["differences"])


@pytest.mark.parametrize(
    "name", ["run", "runner", "leader", "follower", "nanny", "scheduler", "worker", "joblife"]
)
def test_a_rank_does_not_load_arrays(name):
    """They, and CuPy with them, would cost every rank a second."""
    assert "dask.array" not in imported(f"hpcdask.{name}")["modules"]


def test_public_names_are_there():
    for name in hpcdask.__all__:
        assert getattr(hpcdask, name).__module__.startswith("hpcdask.")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hpcdask.no_such_name
