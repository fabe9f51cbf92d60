"""What processes listen on, as the kernel tells it: ``/proc/net`` and their descriptors."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

LISTENS = "0A"


def listening_ports(processes: Iterable[psutil.Process]) -> dict[str, int]:
    """TCP ports that processes listen on, by the socket, which several may have."""
    ports = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS:
                ports[f"socket:[{inode}]"] = int(local.rpartition(":")[2], 16)
    found = {}
    for process in processes:
        with contextlib.suppress(OSError):
            folder = f"/proc/{process.pid}/fd"
            for number in os.listdir(folder):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"{folder}/{number}")
                    if target in ports:
                        found[target] = ports[target]
    return found


def free_range(size: int) -> range:
    """As many ports in a row that nobody listens on, below those that the kernel gives out."""
    taken = set(listening_ports(psutil.process_iter()).values())
    start = 12000 + os.getpid() % 1000 * 15
    for first in range(start, 32000 - size, size):
        ports = range(first, first + size)
        if not taken & set(ports) and all(map(is_free, ports)):
            return ports
    raise AssertionError(f"no {size} ports in a row are free")


def is_free(port: int) -> bool:
    """Whether it can be listened on."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def text(ports: Sequence[int]) -> str:
    """As the option has it."""
    return f"{ports[0]}-{ports[-1]}"
