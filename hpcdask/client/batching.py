"""How long messages between clients, scheduler and workers wait for each other.

distributed holds them back so that more of them travel together: 10 ms at the client, 5 at the
scheduler, 2 at the worker. A worker with one thread then idles between short Dask tasks, and a
program that waits for each result before it asks for the next spends most of its time so. What
gathers while a message is being written travels together in any case.

The module is a preload of distributed's client, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import dask.config

from hpcdask.upstream import distributed

if TYPE_CHECKING:
    from distributed import Client

#: Seconds between two messages.
BATCH_INTERVAL_S = 0.0
#: And at most between those of a worker that has more Dask tasks to run. With distributed's 2 ms,
#: each task of 2 ms has a message of its own.
BUSY_INTERVAL_S = 0.01
PRELOADS = "distributed.client.preload"


def dask_setup(client: Client) -> None:
    """Have a client that has just connected send at once; distributed calls it."""
    send_at_once(client.scheduler_comm)


def send_at_once(stream: Any) -> None:
    """Have messages of a stream of distributed's wait for no others."""
    distributed.set_interval(stream, BATCH_INTERVAL_S)


def pace(stream: Any, *, ready: int) -> None:
    """Let a worker's messages gather until they are as many as the Dask tasks it has yet to run.

    What it sends is then on its way before it idles. Each message costs the thread that runs Dask
    tasks some time, as it gives up Python's lock, and the scheduler and the client as well.
    """
    distributed.set_interval(stream, BUSY_INTERVAL_S if ready else BATCH_INTERVAL_S)
    if distributed.gathered(stream) >= ready:
        distributed.send_now(stream)


def prompt_clients() -> dict[str, list[str]]:
    """What Dask's configuration says where clients send at once, beside the user's own preloads.

    Nothing where those have arguments: distributed matches them by their number.
    """
    if dask.config.get(f"{PRELOADS}-argv", None):
        return {}
    logging.getLogger("distributed.preloading").addFilter(_of_another)
    return {PRELOADS: [*_others(), __name__]}


def usual_clients() -> dict[str, list[str]]:
    """What it says without that."""
    return {PRELOADS: _others()}


def _others() -> list[str]:
    preloads = dask.config.get(PRELOADS, None) or []
    names = [preloads] if isinstance(preloads, str) else preloads
    return [name for name in names if name != __name__]


def _of_another(record: logging.LogRecord) -> bool:
    """Leave out what distributed says of each preload, of this one; but not that it fails."""
    return record.levelno > logging.INFO or __name__ not in record.getMessage()
