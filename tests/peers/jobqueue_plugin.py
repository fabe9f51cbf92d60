"""A pytest plugin: dask-jobqueue's own tests meet hpcdask's classes under dask-jobqueue's names.

It also brings what the repository of dask-jobqueue has in a conftest.py, which its source
distribution leaves out: the fixtures and markers of its tests.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask_jobqueue
import pytest
from dask_jobqueue import local
from distributed import Security
from distributed.utils_test import cleanup, loop, loop_in_thread  # noqa: F401 (fixtures)

import hpcdask
from hpcdask.clusters.cluster import JobCluster

SYSTEMS = ("PBS", "Moab", "SLURM", "SGE", "LSF", "OAR", "HTCondor", "Local")
ENVIRONMENTS = {"PBS": "pbs", "SLURM": "slurm", "SGE": "sge", "LSF": "lsf", "OAR": "oar"}
ENVIRONMENTS |= {"HTCondor": "htcondor", "Local": None}


class Job:
    """What their tests ask of a Job class, asked of a cluster of ours with the same keywords."""

    cluster: type

    def __init__(self, **keywords: Any) -> None:
        self._script = asyncio.run(self._preview(keywords))

    async def _preview(self, keywords: dict[str, Any]) -> str:
        made = self.cluster(asynchronous=True, **keywords)
        try:
            return made.job_script()
        finally:
            await made.close()

    def job_script(self) -> str:
        return self._script


#: What distributed's SpecCluster has of scheduler and workers, said of ours.
SPECS = {
    "scheduler_spec": property(
        lambda self: {"options": {**self.options.scheduler, "security": self.security}}
    ),
    "new_spec": property(lambda self: {"options": {"interface": self.groups[""].spec.interface}}),
}


def stand_in(system: str) -> type:
    """The class of hpcdask as a program sees it that changes the import, on the CPU."""
    name = "LocalCUDAJob" if system == "Local" else f"{system}CUDA"
    base = getattr(hpcdask, f"{name}Cluster")

    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        base.__init__(self, *args, **{"device": "cpu", **keywords})

    theirs = importlib.import_module(f"dask_jobqueue.{system.lower()}")
    config = {"config_name": getattr(theirs, f"{system}Job").config_name}
    body = {"__init__": __init__, "__doc__": base.__doc__, **SPECS}
    cls = type(f"{system}Cluster", (base,), body)
    cls.job_cls = type(f"{system}Job", (Job,), {"cluster": cls, **config})
    return cls


OURS = {system: stand_in(system) for system in SYSTEMS}
for system, cls in OURS.items():
    setattr(local if system == "Local" else dask_jobqueue, cls.__name__, cls)


def pytest_configure(config: pytest.Config) -> None:
    keys = Security.temporary()
    for name, text in (("key", keys.tls_client_key), ("ca", keys.tls_ca_file)):
        path = Path(dask_jobqueue.__file__).parent / "tests" / f"{name}.pem"
        path.write_text(text)
    for marker in ("env", "xfail_env", "asyncio"):
        config.addinivalue_line("markers", f"{marker}: of dask-jobqueue")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if any(mark.args[0] for mark in item.iter_markers("env")):
        pytest.skip("needs the queueing system")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the tests that are coroutines."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    made = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})

    async def run() -> None:
        try:
            await made
        finally:  # one of them leaves its cluster open
            for cluster in [one for one in gc.get_objects() if isinstance(one, JobCluster)]:
                if inspect.isawaitable(closing := cluster.close()):
                    await closing

    asyncio.run(run())
    return True


@pytest.fixture(autouse=True)
def disk_of_jobs() -> Iterator[None]:
    """HTCondor wants it."""
    with dask.config.set({"jobqueue.htcondor.disk": "1GB"}):
        yield


@pytest.fixture(params=ENVIRONMENTS)
def Cluster(request: pytest.FixtureRequest) -> type:
    return OURS[request.param]


@pytest.fixture(
    params=[
        pytest.param(system, marks=pytest.mark.env(name)) for system, name in ENVIRONMENTS.items()
    ]
)
def EnvSpecificCluster(request: pytest.FixtureRequest) -> type:
    return OURS[request.param]
