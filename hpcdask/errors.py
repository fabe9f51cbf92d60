"""Errors before or while a cluster runs, as one tree.

::

    HpcdaskError                 exit code 1
    ├── UsageError               exit code 2: nothing was started, the text says what to change;
    │   │                        a ValueError too, as dask-jobqueue raises
    │   ├── DeviceError          no GPU, too few distinct GPUs, a GPU that cannot be used
    │   ├── LaunchError          the launcher's environment and MPI disagree, or a rank is missing
    │   ├── SchedulerFileError   a scheduler file that is stale, foreign or unreadable
    │   └── MissingExtra         a package that an optional feature needs is not installed
    ├── ClusterError             the running cluster lost a part that it cannot do without
    │   └── JobsFailed           jobs end before their workers arrive, so no more are submitted
    ├── GangError                a rank of a gang failed, so all of it ended
    └── QueueError               a queueing system does not answer, or not as it should
        └── Refused              it does not take a job

Each message says what happened, where, and what to do next, in one line.
"""

from __future__ import annotations

from typing import Any


class HpcdaskError(Exception):
    """Base of all errors that hpcdask raises on purpose."""

    exit_code = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return remake, (type(self), self.args), vars(self)


def remake(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an error again, for pickle: a constructor may take other arguments than the text."""
    error = kind.__new__(kind)
    error.args = args
    return error


class UsageError(HpcdaskError, ValueError):
    """Bad input, found before anything was started."""

    exit_code = 2


class DeviceError(UsageError):
    """The devices that were found do not fit the ranks that were started."""


class LaunchError(UsageError):
    """The ranks of one launch could not find one another."""


class SchedulerFileError(UsageError):
    """A scheduler file that cannot be used."""


class MissingExtra(UsageError):
    """An optional `package` is not installed; the `extra` of hpcdask brings it, `why` needs it."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f"{why} needs {package}, which is not installed: {installing(extra)}")


def installing(extra: str) -> str:
    """Return the command that installs the packages of an extra: hpcdask itself is on no index."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        parts = [one.partition(";") for one in requires("hpcdask") or ()]
    except PackageNotFoundError:  # in a source folder
        parts = []
    wanted = [name.strip() for name, _, marker in parts if f"'{extra}'" in marker.replace('"', "'")]
    return " ".join(["pip install", *(f'"{one}"' for one in wanted or [f"hpcdask[{extra}]"])])


class ClusterError(HpcdaskError):
    """The running cluster lost its scheduler, its workers or a rank."""


class JobsFailed(ClusterError):
    """Jobs keep ending before they are of use, so no more are submitted."""


class GangError(HpcdaskError):
    """A gang has ended because one of its ranks failed, lost its worker, or took too long.

    ``__cause__`` is what the rank raised, if it raised anything.

    Parameters
    ----------
    text
        What happened.
    rank
        The rank that failed first; None if it is not known, as when several took too long.
    worker, host
        The name of its worker, and where that was.
    """

    def __init__(
        self, text: str, rank: int | None = None, worker: str | None = None, host: str | None = None
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.worker = worker
        self.host = host


class QueueError(HpcdaskError):
    """A queueing system hangs, fails, or is not understood; `for_now` if it may go well later."""

    for_now = False


class NoAnswer(QueueError):
    """A command of a queueing system hangs, or its answer was lost; it may have done its work."""

    for_now = True


class NotHere(QueueError):
    """This host cannot run a command of the queueing system, or may not."""


class Refused(QueueError):
    """The queueing system did not take a job; `fewer` (by default `for_now`) may be taken."""

    def __init__(self, text: str, *, for_now: bool = False, fewer: bool | None = None) -> None:
        super().__init__(text)
        self.for_now = for_now
        self.fewer = for_now if fewer is None else fewer


def root_cause(error: BaseException) -> str:
    """Return the first cause of an error in one line; hpcdask's own errors name theirs."""
    while (cause := error.__cause__) is not None and not isinstance(error, HpcdaskError):
        # a deadline of asyncio has its own means as the cause; asyncio is not imported for it
        if type(cause).__name__ == "CancelledError":
            break
        error = cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
