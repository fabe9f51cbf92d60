"""Importing starts nothing, opens nothing, changes no signal handler, needs no CUDA and no MPI."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import hpcdask

OPTIONAL = ["cuda", "cupy", "dask_cuda", "distributed_ucxx", "mpi4py", "pynvml", "rmm", "ucxx"]
NEED_UCX = ("comm.ucx", "upstream.ucxx")
MODULES = [
    "hpcdask",
    *(
        module.name
        for module in pkgutil.walk_packages(hpcdask.__path__, "hpcdask.")
        # those that only processes which have the CUDA packages and use ucx import
        if not module.name.endswith(("__main__", *NEED_UCX))
    ),
]
PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({*sys.modules})))
"""


#: The modules of each package in a fork of its own.
FORKS = """
import importlib, json, os, signal, sys, traceback

optional = set(json.load(sys.stdin))
asked = []


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in optional:
            return
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("importlib"):
            frame = frame.f_back
        importer = frame.f_globals["__name__"]
        if importer.partition(".")[0] == "hpcdask":
            asked.append([importer, name])
        raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, Missing())
import asyncio, click, cryptography.x509, dask.array, distributed, gc, numpy, psutil, yaml
import bokeh.embed, bokeh.models, bokeh.plotting, bokeh.resources, rich.progress, rich.table
gc.freeze()
gc.disable()  # a collection would have each fork copy all of that


def state():
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return {
        "signals": [repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "threads": len(os.listdir("/proc/self/task")),
        "sockets": sum(os.readlink(link).startswith("socket:") for link in links
                       if os.path.islink(link)),
        "children": open("/proc/self/task/%d/children" % os.getpid()).read(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }


for names in sys.argv[1:]:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    errors, before = [], state()
    for name in names.split():
        try:
            importlib.import_module(name)
        except BaseException:
            errors.append([name, traceback.format_exc()])
    after = state()
    differences = [key for key in before if before[key] != after[key]]
    found = {"modules": names, "errors": errors, "asked": asked, "differences": differences}
    print(json.dumps(found), flush=True)
    os._exit(0)
"""


def imported(*modules: str) -> set[str]:
    """Return what a new Python has loaded once it has imported these modules."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return set(json.loads(done.stdout))


def test_the_package_and_its_commands_import_next_to_nothing():
    """The commands import dask when one runs that needs it; a rank waits for the fork server."""
    nothing = {"dask", "distributed", "numpy", "cryptography", *OPTIONAL}
    assert not imported("hpcdask") & {*nothing, "click"}
    assert not imported("hpcdask.cli") & nothing
    for entry in ("hpcdask.run", "hpcdask.worker"):
        assert not imported(entry) & {*nothing, "psutil"}


def test_a_job_reads_its_options_without_dask():
    """Regression: a number of bytes was read by dask, whose import took a tenth of its start."""
    text = "--scheduler tls://10.0.0.1:8786 --cluster a --memory-limit 1073741824 --nthreads 1"
    program = "import sys; from hpcdask.worker import parse; parse(sys.argv[1:])"
    words = [sys.executable, "-c", f"{program}; sys.exit('dask' in sys.modules)", *text.split()]
    assert subprocess.run(words, check=False).returncode == 0


@pytest.mark.slow
def test_no_module_needs_an_optional_package():
    """What the modules of each package do when they are imported without others before them.

    One Python loads what they share, none of it ours, and forks once for each package. There the
    optional packages are missing, and who asks for one is noted.
    """
    packages: dict[str, list[str]] = {}
    for name in MODULES:
        packages.setdefault(".".join(name.split(".")[:2]), []).append(name)
    groups = [" ".join(names) for names in packages.values()]
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *groups],
        input=json.dumps(OPTIONAL),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    nothing = {"errors": [], "asked": [], "differences": []}
    assert [one["modules"] for one in found] == groups
    assert not [one for one in found if one != {"modules": one["modules"], **nothing}]


def test_a_rank_does_not_load_arrays():
    """They, and CuPy with them, would cost every rank a second."""
    parts = ("run", "worker", "node.nanny", "node.job_agent", "runner.agent")
    parts += ("runner.leader", "runner.scheduler")
    assert "dask.array" not in imported(*(f"hpcdask.{part}" for part in parts))


def test_public_names_are_there():
    for name in hpcdask.__all__:
        assert getattr(hpcdask, name).__module__.startswith("hpcdask.")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hpcdask.no_such_name
