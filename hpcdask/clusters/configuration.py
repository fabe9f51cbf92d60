"""dask-jobqueue and its part of Dask's configuration, from which comes what nobody gave."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import dask.config

from hpcdask.errors import UsageError
from hpcdask.jobs.folder import base_path
from hpcdask.security.credentials import check_configuration

MISSING = object()


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


@contextlib.contextmanager
def section(config_name: str, usual: str) -> Iterator[None]:
    """Fill a section of the configuration with the usual section's values where it has none.

    Raises UsageError if there is no such section.
    """
    if not isinstance(dask.config.get(f"jobqueue.{config_name}", None), Mapping):
        sections = ", ".join(sorted(dask.config.get("jobqueue")))
        raise UsageError(
            f"config_name={config_name!r}: Dask's configuration has no section "
            f"jobqueue.{config_name}. It has: {sections}. A new one needs only what differs from "
            f"jobqueue.{usual}"
        )
    missing = {
        f"jobqueue.{config_name}.{key}": value
        for key, value in (dask.config.get(f"jobqueue.{usual}", None) or {}).items()
        if dask.config.get(f"jobqueue.{config_name}.{key}", MISSING) is MISSING
    }
    with dask.config.set(missing):
        yield


def configured(name: str, given: Mapping[str, Any], config_name: str, default: Any = None) -> Any:
    """The value of a keyword: as it was given, else that of the section."""
    value = given.get(name)
    if value is None:
        value = dask.config.get(f"jobqueue.{config_name}.{name.replace('_', '-')}", None)
    return default if value is None else value


def log_directory(given: Mapping[str, Any], config_name: str) -> str | None:
    """Where the user wants the jobs' logs, or None for the cluster's folder."""
    path = configured("log_directory", given, config_name)
    return None if path is None else str(base_path(path))


def refuse_schedulers(given: Collection[str]) -> None:
    """Refuse what dask-jobqueue takes for its scheduler."""
    for keyword in ("dashboard_address", "host"):
        if keyword in given:
            raise UsageError(
                f'{keyword} belongs to the scheduler: scheduler_options={{"{keyword}": …}}'
            )
