"""dask-jobqueue and its part of Dask's configuration, from which comes what nobody gave."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Mapping
from typing import Any

import dask.config

from hpcdask.errors import UsageError
from hpcdask.security.credentials import check_configuration


def import_jobqueue(module: str) -> Any:
    """Import a module of dask-jobqueue. Raises UsageError if others may write Dask's configuration.

    The import would replace the handler of SIGINT, and writes a file of configuration.
    """
    real, mask = signal.signal, os.umask(0o077)
    signal.signal = lambda *args: None
    try:
        found = importlib.import_module(f"dask_jobqueue.{module}")
        if not dask.config.get(f"jobqueue.{module}.name", None):
            # imported first inside a block of dask.config.set, whose end took the defaults away
            importlib.import_module("dask_jobqueue.config").reconfigure()
    finally:
        signal.signal = real
        os.umask(mask)
    check_configuration()
    return found


def import_job_class(jobqueue: tuple[str, str]) -> Any:
    """Import a Job class; see `Queue.jobqueue`."""
    module, name = jobqueue
    if "." not in name:
        return getattr(import_jobqueue(module), name)
    import_jobqueue("core")
    path, _, name = name.rpartition(".")
    return getattr(importlib.import_module(path), name)


def read_section(jobqueue: tuple[str, str], config_name: str | None = None) -> dict[str, Any]:
    """Return a system's section of the configuration, or the one of this name.

    What it lacks comes from the system's own section, and from that of the Job class. Raises
    UsageError if there is no such section.
    """
    usual = import_job_class(jobqueue).default_config_name()
    sections: Mapping[str, Any] = dask.config.get("jobqueue")
    if config_name is not None and not isinstance(sections.get(config_name), Mapping):
        raise UsageError(
            f"config_name={config_name!r}: Dask's configuration has no section "
            f"jobqueue.{config_name}. It has: {', '.join(sorted(sections))}. A new one needs only "
            f"what differs from jobqueue.{jobqueue[0]}"
        )
    names = dict.fromkeys((usual, jobqueue[0], config_name or usual))
    found = [sections.get(name) or {} for name in names]
    return {name.replace("_", "-"): value for one in found for name, value in one.items()}
