"""The file that tells where a cluster is: distributed's, with keys under ``hpcdask``."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

from hpcdask.errors import SchedulerFileError
from hpcdask.security import private
from hpcdask.security.credentials import Credentials, client_only, save_credentials

#: Environment variable that names the scheduler file, for plain `Client()`.
VARIABLE = "HPCDASK_SCHEDULER_FILE"
#: Folder of a node with a link to the file of each run whose rank 0 is there.
RUNS = "runs"


def write(path: str, address: str, credentials: Credentials, **facts: object) -> None:
    """Write the scheduler file (0600) and, with credentials, ``PATH.keys`` (0600) beside it."""
    path = os.path.abspath(path)
    keys = f"{path}.keys"
    if credentials:
        save_credentials(client_only(credentials), keys)
    content = {
        "type": "Scheduler",
        "address": address,
        "services": {},
        "workers": {},
        "hpcdask": {
            "keys": keys if credentials else None,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **facts,
        },
    }
    private.write_private(path, json.dumps(content, indent=2))


def note(path: str, **facts: Any) -> None:
    """Add facts to a scheduler file of hpcdask's. Raises SchedulerFileError or OSError."""
    content = read(path)
    content["hpcdask"] |= facts
    private.write_private(os.path.abspath(path), json.dumps(content, indent=2))


def remove(path: str, address: str = "") -> None:
    """Remove the scheduler file and its keys, but not those of a cluster at another address."""
    with contextlib.suppress(SchedulerFileError):
        if address and read(path)["address"] != address:
            return
    private.remove(path)
    private.remove(f"{path}.keys")


def check_writable(path: str) -> None:
    """Raise SchedulerFileError unless a scheduler file can be written or replaced."""
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise SchedulerFileError(
            f"--scheduler-file: the folder {folder} does not exist or cannot be "
            f"written. It must be one that the clients' machine shares"
        )
    try:
        private.refuse_open(folder)
    except OSError as error:
        raise SchedulerFileError(
            f"--scheduler-file: {error.strerror}. Name a file in a folder of your own"
        ) from None
    if not os.path.lexists(path):
        return
    content = read(path)
    with (
        contextlib.suppress(OSError),
        socket.create_connection(endpoint(content["address"]), timeout=2),
    ):
        raise SchedulerFileError(
            f"--scheduler-file: {path} belongs to a cluster that still answers at "
            f"{content['address']}. End that one first, or name another file"
        )


def read(path: str) -> dict[str, Any]:
    """Return a scheduler file's content; ``hpcdask`` is empty in distributed's own."""
    path = os.path.abspath(path)
    try:
        content: dict[str, Any] = json.loads(private.read(path))
        host, _ = endpoint(content["address"])
        host.encode("idna")  # as a connection does, with an error of no such form
        content["hpcdask"] = {**content.get("hpcdask", {})}
    except FileNotFoundError:
        raise SchedulerFileError(
            f"{path} does not exist: start the cluster with --scheduler-file "
            f"{path}, and see that this machine shares that folder"
        ) from None
    except private.NotPrivate as error:
        raise SchedulerFileError(
            f"{path} {error.strerror}; a cluster takes programs of its owner only"
        ) from None
    except OSError as error:
        raise SchedulerFileError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SchedulerFileError(
            f"{path} is not a scheduler file. Name the one that --scheduler-file wrote"
        ) from None
    return content


def endpoint(address: str) -> tuple[str, int]:
    """Return host and port of an address such as ``tls://[::1]:8786``."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return host.strip("[]"), int(port)
