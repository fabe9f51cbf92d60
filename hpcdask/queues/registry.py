"""Which queueing systems there are."""

from __future__ import annotations

import importlib

from hpcdask.errors import UsageError
from hpcdask.queues.base import Queue

#: Each is a module that defines one class of queue.
NAMES = ("slurm", "pbs", "lsf", "sge", "oar", "htcondor", "moab", "local")


def queue_class(name: str) -> type[Queue]:
    """The class of a queueing system; its module is imported now.

    Raises UsageError if there is none of this name.
    """
    if name not in NAMES:
        raise UsageError(f"there is no queue {name!r}. There are: {', '.join(NAMES)}")
    module = importlib.import_module(f"hpcdask.queues.{name}")
    (found,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Queue)
        and value.__module__ == module.__name__
    )
    return found
