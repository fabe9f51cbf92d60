"""What can go wrong before or while a cluster runs, as one tree.

::

    HpcdaskError                 exit code 1
    ├── UsageError               exit code 2: nothing was started, the text says what to change
    │   ├── DeviceError          no GPU, too few distinct GPUs, a GPU that cannot be used
    │   ├── LaunchError          the launcher's environment and MPI disagree, or a rank is missing
    │   ├── SchedulerFileError   a scheduler file that is stale, foreign or unreadable
    │   └── MissingExtra         a package that an optional feature needs is not installed
    ├── ClusterError             the running cluster lost a part that it cannot do without
    │   └── JobsFailed           jobs end before their workers arrive, so no more are submitted
    └── QueueError               a queueing system does not answer, or not as it should
        └── Refused              it does not take a job

Each message says what happened, where, and what to do next, in one line.
"""

from __future__ import annotations


class HpcdaskError(Exception):
    """Base of all errors that hpcdask raises on purpose."""

    exit_code = 1


class UsageError(HpcdaskError):
    """Bad input, found before anything was started."""

    exit_code = 2


class DeviceError(UsageError):
    """The devices that were found do not fit the ranks that were started."""


class LaunchError(UsageError):
    """The ranks of one launch could not find one another."""


class SchedulerFileError(UsageError):
    """A scheduler file that cannot be used."""


class MissingExtra(UsageError):
    """An optional package is not installed.

    Parameters
    ----------
    package
        Name of the missing package, as one imports it.
    extra
        The extra of hpcdask that brings it.
    why
        What needs it.
    """

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(
            f'{why} needs {package}, which is not installed: pip install "hpcdask[{extra}]"'
        )


class ClusterError(HpcdaskError):
    """The running cluster lost its scheduler, its workers or a rank."""


class JobsFailed(ClusterError):
    """Jobs keep ending before they are of use, so no more are submitted."""


class QueueError(HpcdaskError):
    """A command of a queueing system hangs, fails, or answers something unknown."""


class Refused(QueueError):
    """The queueing system did not take a job.

    Attributes
    ----------
    for_now
        Whether it may take the same job later, or fewer of them: a limit of the site is reached, or
        the system is too busy.
    """

    def __init__(self, text: str, *, for_now: bool = False) -> None:
        super().__init__(text)
        self.for_now = for_now
