"""Make measurements on a cluster, tell of each when it is made, and write the report.

Where no cluster is given or surrounds the program, it starts itself again as the program of the
runner, which makes a cluster of this machine, or of the ranks of ``mpirun`` and ``srun``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import dask
from distributed import CancelledError, KilledWorker
from distributed.comm import CommClosedError

from hpcdask.bench import limits, summary
from hpcdask.bench.cluster import connect, inspect
from hpcdask.bench.gpus import watched
from hpcdask.bench.records import describe, tell
from hpcdask.bench.startup import AHEAD, age
from hpcdask.bootstrap.environment import interpreter
from hpcdask.errors import ClusterError, UsageError, root_cause
from hpcdask.logs import say
from hpcdask.workloads import WorkloadError

Measurement = Callable[..., dict[str, Any]]


def execute(
    measurements: Sequence[Measurement],
    *,
    scheduler_file: str | None,
    device: str,
    json_file: Path | None,
    report_file: Path | None,
    leave_out: bool = False,
) -> None:
    """Make the measurements on the cluster, and tell of each when it is made."""
    if report_file is not None and json_file == report_file:
        raise UsageError(f"--json and --report are both {report_file}: name two files")
    if scheduler_file is None and dask.config.get("scheduler-address", None) is None:
        _surround(click.get_current_context().find_root().obj, device)
    code = 0
    with (
        _as_ours(),
        connect(scheduler_file) as client,
        _reported(report_file) as lines,
        summary.shown(lines),
    ):
        cluster = inspect(client, device)
        rates: dict[str, float] = {}
        for measurement in measurements:
            try:
                with watched(client) as gpus:
                    line = measurement(cluster)
            except (UsageError, WorkloadError) as exc:
                if not leave_out:
                    raise
                say(f"left out: {exc}")
                continue
            except (KilledWorker, MemoryError) as exc:
                text = f"{type(exc).__name__}: {exc}"
                if not leave_out:
                    raise ClusterError(text) from exc
                say(f"error: {text}")
                code = 1
                continue
            if gpus:
                line["gpus"] = gpus
            lines.append(line)
            if "work" in line:
                if not rates:  # bad input is known by now
                    rates = limits.measure(cluster)
                    known = {"workload": limits.LIMITS, "rates": rates}
                    lines.insert(0, {**known, **describe(cluster)})
                _complete(line, rates)
            code = max(code, tell(line, json_file, as_json=not summary.is_terminal()))
    if code:
        raise SystemExit(code)


@contextlib.contextmanager
def _as_ours() -> Iterator[None]:
    """Raise errors of input, cluster and files as errors of hpcdask."""
    try:
        yield
    except WorkloadError as exc:
        raise UsageError(str(exc)) from exc
    except (CancelledError, CommClosedError, TimeoutError) as exc:
        raise ClusterError(
            f"the measurement lost its cluster ({root_cause(exc)}): see the log of its scheduler, "
            f"and whether its job or run has ended"
        ) from exc
    except OSError as exc:
        raise UsageError(f"{type(exc).__name__}: {exc}") from exc


@contextlib.contextmanager
def _reported(path: Path | None) -> Iterator[list[dict[str, Any]]]:
    """Write the report of the records in this list at the end, also if what fills it fails.

    Or is ended: a queueing system sends SIGTERM some seconds before it kills.
    """
    lines: list[dict[str, Any]] = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        yield lines
    except BaseException:
        if path is not None and lines:
            try:
                _write_report(lines, path)
            except UsageError as exc:  # the exit code is that of the failure
                say(f"warning: {exc}")
        raise
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)
    if path is not None:
        _write_report(lines, path)


def _write_report(lines: list[dict[str, Any]], path: Path) -> None:
    from hpcdask.bench import report  # Bokeh takes half a second to import

    report.write(lines, path)
    say(f"report: {path}")


def _complete(line: dict[str, Any], rates: dict[str, float]) -> None:
    """Add the rates of the hardware, and how far from them the workload is."""
    limit = limits.bound(limits.Work(**line["work"]), rates)
    line["limit"] = limits.against(limit, line["seconds_median"])
    line["rates"] = rates


def _surround(argv: Sequence[str], device: str) -> None:
    """Become the program of the runner, which makes a cluster of this machine or these ranks."""
    options = [] if device == "auto" else ["--device", device]
    command = [*interpreter(), "-m", "hpcdask.run", *options, "-m", "hpcdask.bench", *argv]
    sys.stdout.flush()
    os.environ[AHEAD] = repr(age())
    os.execv(command[0], command)
