"""Failures of Dask tasks that in distributed end workers, or let tasks wait for ever."""

from __future__ import annotations

from typing import Any

from dask.typing import Key
from distributed import Worker
from distributed.core import clean_exception
from distributed.worker_state_machine import ExecuteFailureEvent, GatherDepFailureEvent

from hpcdask.upstream.distributed import raise_error


class Unreadable:
    """Stand-in for a result that this worker could not read; whoever reads it gets the error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @classmethod
    def of(cls, event: GatherDepFailureEvent) -> Unreadable:
        sent: Any = event.exception  # a `Serialize`
        return cls(clean_exception(sent.data)[1] or RuntimeError(event.exception_text))

    def __reduce__(self) -> tuple[Any, ...]:
        return raise_error, (self.error,)


def unreadable_input(worker: Worker, key: Key) -> BaseException | None:
    """Return the error of a result that a Dask task needs, and this worker could not read."""
    task = worker.state.tasks.get(key)
    for one in task.dependencies if task is not None else ():
        if one.type is Unreadable and isinstance(result := worker.data[one.key], Unreadable):
            return result.error
    return None


def failed(worker: Worker, key: Key, error: BaseException, stimulus_id: str) -> ExecuteFailureEvent:
    """Return the event of a Dask task's failure."""
    if isinstance(error, SystemExit):  # distributed would end the worker, and run the task again
        reason = RuntimeError(f"the Dask task called sys.exit({error.code!r})")
        error = reason.with_traceback(error.__traceback__)
    run = worker.state.tasks[key].run_id
    return ExecuteFailureEvent.from_exception(error, key=key, run_id=run, stimulus_id=stimulus_id)
