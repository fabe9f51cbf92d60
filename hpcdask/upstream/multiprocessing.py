"""Private parts of multiprocessing's fork server, as in Python 3.11 to 3.14.

There is no public way to have a process that is running be the fork server, so that imports are
paid once. Here is the standard library only: the probe passes through before all other imports.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import platform
import socket
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, reduction, resource_tracker, util
from typing import Any

from hpcdask.errors import UsageError

Connect = Callable[[list[int]], tuple[int, int]]
_server: Any = forkserver


def check() -> None:
    """Refuse a Python whose fork server has other private parts than those that are used here.

    Otherwise workers would not start, and nobody would say why.
    """
    process = multiprocessing.current_process()
    key = ["_forkserver_authkey"] if wants_key() else []
    parts: list[tuple[str, Any, list[str]]] = [
        ("forkserver", _server, ["MAXFDS_TO_SEND", "connect_to_new_process", "write_signed"]),
        (
            "forkserver._forkserver",
            getattr(_server, "_forkserver", None),
            ["_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid", *key],
        ),
        (
            "resource_tracker._resource_tracker",
            getattr(resource_tracker, "_resource_tracker", None),
            ["_fd", "_pid"],
        ),
        ("current_process()", process, ["_config"]),
    ]
    moved = [
        f"{where}.{name}"
        for where, holder, names in parts
        for name in names
        if not hasattr(holder, name)
    ]
    if "semprefix" not in getattr(process, "_config", {"semprefix": ""}):
        moved.append('current_process()._config["semprefix"]')
    calls: dict[str, tuple[tuple[object, ...], dict[str, int]]] = {
        "main": ((0, 0, []), {"authkey_r": 0} if key else {}),
        "_serve_one": ((0, [], [], {}), {}),
    }
    for name, (arguments, options) in calls.items():
        try:
            inspect.signature(getattr(_server, name)).bind(*arguments, **options)
        except (AttributeError, TypeError):
            moved.append(f"forkserver.{name}()")
    _refuse(moved)


def _refuse(moved: Sequence[str]) -> None:
    if moved:
        parts = ", ".join(f"multiprocessing.{part}" for part in moved)
        raise UsageError(
            f"hpcdask starts workers through private parts of Python, which Python "
            f"{platform.python_version()} has moved or changed: {parts}. Use Python "
            f"3.11 to 3.14, or a newer hpcdask"
        )


def wants_key() -> bool:
    """Whether this Python's fork server serves only who has its key, as from 3.14 on."""
    main = getattr(_server, "main", None)
    return callable(main) and "authkey_r" in inspect.signature(main).parameters


def name_files(semaphores: str, folder: str | None) -> None:
    """What semaphores' names begin with, and the folder of sockets, if it is to be another."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = semaphores
    if folder is not None:
        config["tempdir"] = folder
        if util.get_temp_dir() != folder:
            _refuse(['current_process()._config["tempdir"]'])


def use_tracker(fd: int) -> None:
    """Have a resource tracker that is running be this process's.

    As in a process that has it from its parent: Python 3.13.5 would wait at its end for that of a
    tracker of its own, which lives as long as the template and workers.
    """
    tracker: Any = resource_tracker._resource_tracker
    tracker._fd, tracker._pid = fd, None


def serve(listener: int, alive: int, preimport: Sequence[str], **key: int) -> None:
    """Be a fork server, until nobody holds the other end of ``alive``."""
    _server.main(listener, alive, list(preimport), **key)


def use_server(address: str, alive: int, pid: int, key: bytes, connect: Connect) -> None:
    """Have a process that serves be this one's fork server, and `connect` ask for new ones."""
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
    """What was sent; raises EOFError where the other end is closed."""
    return list(reduction.recvfds(line, _server.MAXFDS_TO_SEND))


def obey(order: list[int]) -> int:
    """Run what the fork server's child would; returns the exit code."""
    data, *others = order
    return int(_server._serve_one(data, others, [], {}))


def write_number(fd: int, number: int) -> None:
    """Write an id or exit code as the fork server does."""
    _server.write_signed(fd, number)
