"""Preload of the fork server, which has one thread and no CUDA context, and keeps it so."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
from collections.abc import Collection
from types import FrameType

from hpcdask.bootstrap.environment import SAFE_PATH
from hpcdask.errors import UsageError
from hpcdask.gpu.driver import has_nvidia_driver
from hpcdask.logs import complain
from hpcdask.process import SIGNALS, mark, raise_descriptor_limit
from hpcdask.spec.specs import WorkerSpec
from hpcdask.upstream.configuration import reading

#: Has names of modules, and the words ``ucx`` where workers may exchange by it, and ``silent``.
WANTED = "HPCDASK_PRELOAD"
#: How long a network may be silent, where the user has configured nothing: after distributed's 30 s
#: a switch that restarts ends a run of hours.
TIMEOUT, SILENCE = "distributed.comm.timeouts.tcp", "2 minutes"
#: Variables that beat OMP_NUM_THREADS in their library; distributed would set them to 1.
OWN_THREADS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def variables(spec: WorkerSpec, *modules: str, peers: bool, silent: bool = False) -> dict[str, str]:
    """Return variables that tell `preload` what to load; ``silent`` ranks do not complain."""
    gpus = spec.device != "cpu" and has_nvidia_driver()
    ucx = spec.protocol == "ucx" or (gpus and spec.protocol == "auto" and peers)
    words = ["distributed.http", *modules, *["cuda.bindings.driver"] * gpus]
    return {WANTED: " ".join(words + ["ucx"] * ucx + ["silent"] * silent)}


def _ignore(number: int, frame: FrameType | None) -> None:
    """Leave a signal to the rank, which ends its processes in good order."""


def preload(wanted: Collection[str]) -> None:
    """Prepare this process, of which all others are forks."""
    for number in SIGNALS:  # not SIG_IGN, which programs that a Dask task starts would inherit
        signal.signal(number, _ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ.pop(SAFE_PATH, None)
    raise_descriptor_limit()
    gc.disable()  # it takes 0.15 s of the imports, and finds nothing
    try:
        with reading():
            import dask.config
    except UsageError as error:  # the process that started this one ends with the same code
        if "silent" not in wanted:
            complain(error)
        os._exit(error.exit_code)
    configured = dask.config.get("distributed.nanny.pre-spawn-environ", None) or {}
    for name, value in configured.items():
        os.environ.setdefault(name, str(value))
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")  # packages may load NumPy
    for name in OWN_THREADS:
        os.environ.setdefault(name, threads)
    if "ucx" in wanted:
        from hpcdask.comm import ucx_config

        ucx_config.install()  # before there is a second thread
    for name in filter(lambda word: "." in word, wanted):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if dask.config.get(TIMEOUT, config=dask.config.collect(), default=None) is None:
        dask.config.set({TIMEOUT: SILENCE})
    mark("distributed imported")
    gc.freeze()
    gc.enable()


if WANTED in os.environ:
    preload(os.environ.pop(WANTED).split())
