"""A light rank holds its place in the launch, while rank 0 of the same node runs its worker.

Ranks that compute on the CPU all need the same imports, which cost more than the rest of their
start. So those of one node leave theirs to rank 0, as workers of its template. A rank that differs
from rank 0 in more than its number is no light one: its cgroup, limits or variables are meant.

Both meet at a socket of Linux' abstract namespace, which is named after the launch; the kernel says
whose process the other one is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from hpcdask.bootstrap import resources
from hpcdask.bootstrap.ranks import Rank
from hpcdask.gpu.driver import has_nvidia_driver
from hpcdask.logs import complain
from hpcdask.process import ENDING, PASSED_ON, SAME_SIGNAL_S, TERM_DEADLINE_S

#: Seconds that rank 0 gets to listen, and then to take this rank in.
LISTEN_DEADLINE_S, WELCOME_DEADLINE_S = 5.0, 240.0
#: The variable that is 0 where each rank is to have its own worker.
SWITCH = "HPCDASK_LIGHT_RANKS"
#: Variables that a launcher, or hpcdask, makes for each rank.
OF_THE_RANK = re.compile(r"(OMPI|OPAL|PMIX|PRTE|PMI|MPI|MV2|I_MPI|HYD|PALS|FLUX|SLURM|HPCDASK)")
#: Options by which the ranks of a node differ.
APART = re.compile(r"dedicated|--(layout|groups|profile\S*)(=.*)?")


def may_be(rank: Rank, arguments: Sequence[str]) -> bool:
    """Whether ranks may be light in this launch, as far as the command line tells unread."""
    if rank.size == 1 or not rank.one_node or os.environ.get(SWITCH) == "0":
        return False
    on_cpu = re.search(r"--device[ =]cpu\b", " ".join(arguments)) is not None
    if not on_cpu and (has_nvidia_driver() or find_spec("pynvml") is not None):
        return False
    return not any(APART.fullmatch(word) for word in arguments)


def begin(rank: Rank | None, arguments: Sequence[str]) -> socket.socket | None:
    """Rank 0 listens for light ranks, another one is light: it returns if that is not to be."""
    if rank is None or not may_be(rank, arguments):
        return None
    if rank.index == 0:
        return listen(rank)
    stay_light(rank)
    return None


def _address(rank: Rank) -> str:
    name = f"{os.geteuid()}-{hashlib.sha256(rank.launch_id.encode()).hexdigest()}"
    return f"\0hpcdask-ranks-{name}"


def listen(rank: Rank) -> socket.socket | None:
    """Rank 0: have the others ask to be light, before it can answer."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_address(rank))
        listener.listen(4096)
    except OSError:  # somebody has taken the name
        listener.close()
        return None
    return listener


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end."""
    size = struct.calcsize("3i")
    pid, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def stay_light(rank: Rank) -> None:
    """Another rank: be light until the end of the run. Returns if it has to be a whole one."""
    with socket.socket(socket.AF_UNIX) as sock:
        if not _reach(rank, sock):
            return
        leader, user = peer(sock)
        if user != os.geteuid() or traits(leader) != traits(os.getpid()):
            return
        place = {"rank": rank.index, "local_index": rank.local_index, "pid": os.getpid()}
        _send(sock, **place, cores=sorted(resources.launcher_cores()))
        sock.settimeout(WELCOME_DEADLINE_S)
        with contextlib.suppress(OSError, ValueError), sock.makefile("r") as lines:
            if lines.readline():
                sock.settimeout(None)
                _wait(rank, sock, lines)


def _reach(rank: Rank, sock: socket.socket) -> bool:
    """Connect to rank 0, which may be a moment later."""
    deadline = time.monotonic() + LISTEN_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            sock.connect(_address(rank))
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def traits(pid: int) -> list[object]:
    """What makes a rank what it is, but for its number. Different for one that cannot be seen."""
    found: list[object] = []
    for name in ("cgroup", "limits", "cmdline", "environ"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                found.append(file.read())
        except OSError:
            return [pid]
    environment = found.pop()
    assert isinstance(environment, bytes)
    variables = os.fsdecode(environment).split("\0")
    found.append(sorted(one for one in variables if not OF_THE_RANK.match(one)))
    try:
        return [*found, os.readlink(f"/proc/{pid}/cwd")]
    except OSError:
        return [pid]


def _send(sock: socket.socket, **message: Any) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _wait(rank: Rank, sock: socket.socket, lines: Any) -> NoReturn:
    """Until rank 0 says how the run ended. Signals are told to it; the second ends this process."""
    first: list[float] = []

    def end(number: int, frame: object) -> None:
        if not first:
            first.append(time.monotonic())
            with contextlib.suppress(OSError):
                _send(sock, op="Signal", number=number)
            if number != signal.SIGINT:  # a program may take its time after Ctrl-C
                signal.signal(signal.SIGALRM, lambda *_: os._exit(128 + number))
                signal.alarm(int(TERM_DEADLINE_S))
        elif time.monotonic() - first[0] > SAME_SIGNAL_S:
            os._exit(128 + number)

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: None)
    with contextlib.suppress(OSError, ValueError):
        while line := lines.readline():
            message = json.loads(line)
            if message["op"] == "EndRun":
                os._exit(message["code"])
    if rank.index == 1:
        complain(f"rank 0 on {rank.host} is gone: it was killed. See what it printed. The run ends")
    os._exit(1)
