"""Private parts of multiprocessing's fork server, as in Python 3.11 to 3.14.

There is no public way to have a process that is running be the fork server, so that imports are
paid once. Here is the standard library only: the probe passes through before all other imports.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from typing import Any

from .parts import require

SEEN = "Python 3.11 to 3.14"
Connect = Callable[[list[int]], tuple[int, int]]
_server: Any = forkserver


def check() -> None:
    """Raise UsageError if this Python's fork server lacks a private part that is used here."""
    require(SEEN, forkserver, "_forkserver", "_serve_one", "main", "write_signed")
    require(SEEN, forkserver, "MAXFDS_TO_SEND", "connect_to_new_process")
    names = ["_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid"]
    require(SEEN, _server._forkserver, *names, *["_forkserver_authkey"] * wants_key())
    require(SEEN, resource_tracker, "_resource_tracker")
    require(SEEN, resource_tracker._resource_tracker, "_fd", "_pid")


def wants_key() -> bool:
    """Return whether this Python's fork server serves only who has its key, as from 3.14 on."""
    main = getattr(_server, "main", None)
    return callable(main) and "authkey_r" in inspect.signature(main).parameters


def use_tracker(fd: int) -> None:
    """Make a running resource tracker this process's.

    As in a process that has it from its parent: Python 3.13.5 would wait at its end for that of a
    tracker of its own, which lives as long as the template and workers.
    """
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd, tracker._pid = fd, None


def serve(listener: int, alive: int, preimport: Sequence[str], **key: int) -> None:
    """Be a fork server, until nobody holds the other end of ``alive``."""
    _server.main(listener, alive, list(preimport), **key)


def use_server(address: str, alive: int, pid: int, key: bytes, connect: Connect) -> None:
    """Make a serving process this one's fork server, with `connect` for new processes."""
    vars(forkserver)["connect_to_new_process"] = connect
    client = _server._forkserver
    if key:
        client._forkserver_authkey = key
    client._forkserver_address = address
    client._forkserver_alive_fd = alive
    client._forkserver_pid = pid


def ask_server(fds: list[int]) -> tuple[int, int]:
    """Where a new process of the fork server writes its id and end, and expects its work."""
    found: tuple[int, int] = _server._forkserver.connect_to_new_process(fds)
    return found


def leave_server() -> None:
    """Close this process's hold on its fork server."""
    client = _server._forkserver
    if client._forkserver_alive_fd is not None:
        os.close(client._forkserver_alive_fd)
        client._forkserver_alive_fd = None


def send_order(line: socket.socket, data: int, fds: list[int]) -> None:
    """Send a process what the fork server's child gets, for `obey`."""
    alive: Any = _server._forkserver._forkserver_alive_fd
    tracker: Any = resource_tracker.getfd()
    reduction.sendfds(line, [data, alive, tracker, *fds])


def receive_order(line: socket.socket) -> list[int]:
    """Return what was sent; raises EOFError where the other end is closed."""
    return list(reduction.recvfds(line, _server.MAXFDS_TO_SEND))


def obey(order: list[int]) -> int:
    """Run what the fork server's child would; returns the exit code."""
    data, *others = order
    return int(_server._serve_one(data, others, [], {}))


def write_number(fd: int, number: int) -> None:
    """Write an id or exit code as the fork server does."""
    _server.write_signed(fd, number)
