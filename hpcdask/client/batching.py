"""Messages between clients, scheduler and workers are sent at once.

distributed holds them back, 10 ms at the client, 5 at the scheduler, 2 at the worker, which a
program that waits for each result pays each time. Messages that gather while another is written
travel together in any case. This module is a preload of distributed's client, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import dask.config

from hpcdask.upstream import distributed

if TYPE_CHECKING:
    from distributed import Client

PRELOADS = "distributed.client.preload"


def dask_setup(client: Client) -> None:
    """Send a new client's messages at once; distributed calls this."""
    send_at_once(client.scheduler_comm)


def send_at_once(stream: Any) -> None:
    """Send each message of a stream of distributed's without waiting for others."""
    distributed.set_interval(stream, 0.0)


def prompt_clients() -> dict[str, list[str]]:
    """Return the Dask configuration that adds this module to the user's own preloads.

    Empty where those have arguments: distributed matches them by their number.
    """
    preloads = dask.config.get(PRELOADS, None) or []
    names = [preloads] if isinstance(preloads, str) else preloads
    if __name__ in names or dask.config.get(f"{PRELOADS}-argv", None):
        return {}
    logging.getLogger("distributed.preloading").addFilter(_is_news)
    return {PRELOADS: [*names, __name__]}


def _is_news(record: logging.LogRecord) -> bool:
    """Drop distributed's INFO lines about this preload; keep its errors."""
    return record.levelno > logging.INFO or __name__ not in record.getMessage()
