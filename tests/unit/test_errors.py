"""What is said of an error that came through processes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdask.errors import DeviceError, QueueError, root_cause
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.jobs.watchdog import start_watchdog
from hpcdask.runner.messages import loss_of
from hpcdask.runner.protocol import WorkerFailed


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_the_first_cause_is_told():
    error = caused(RuntimeError("Nanny failed to start."), OSError("no space left"))
    assert root_cause(error) == "OSError: no space left"


def test_an_error_of_ours_is_told_rather_than_what_it_came_from():
    """RMM's words were told, and not who is on the GPU."""
    ours = caused(DeviceError("no room for an RMM pool"), MemoryError("std::bad_alloc"))
    assert root_cause(caused(RuntimeError("Nanny failed"), ours)) == (
        "DeviceError: no room for an RMM pool"
    )


def test_where_to_look_if_a_part_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_memory(*args: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    folder = ClusterFolder.create("c", "local", tmp_path / "base")
    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(QueueError, match=r"watchdog.*Cannot allocate memory\. See .*ulimit -u"):
        start_watchdog(folder)
    arrivals = SimpleNamespace(name=lambda index: f"rank {index} on n1")
    told = loss_of(WorkerFailed(1, "n1-1", "it was killed."), arrivals)
    assert told.startswith("a worker of rank 1 on n1 did not start: it was killed. See ")
