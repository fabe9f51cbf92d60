"""Bad input that rank 0 finds before the start."""

from __future__ import annotations

import re
import socket

from hpcdask.client import scheduler_file
from hpcdask.errors import UsageError

from .options import RunRequest


def check_request(request: RunRequest) -> None:
    """Raise UsageError, or another error of hpcdask, for bad input that only rank 0 can see."""
    spec = request.spec
    if spec.groups and spec.device != "auto":
        raise UsageError(
            f"--groups {' '.join(spec.groups)} says what each rank computes on, and "
            f"--device {spec.device} that all compute on the same: leave one out"
        )
    if request.program is not None:
        request.program.check()
    if spec.scheduler_file is not None:
        scheduler_file.check_writable(spec.scheduler_file)
    if spec.dashboard_address:
        _check_port(spec.dashboard_address)


def _check_port(address: str) -> None:
    """Refuse a port that was asked for by number and is taken."""
    host, _, number = address.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", number) or int(number) > 65535:
        raise UsageError(
            f"--dashboard-address: {address!r} is not an address. Accepted: :8787, 8787, "
            f"0.0.0.0:8787, :0 (any free port)"
        )
    if int(number) == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(number)))
        except OSError as error:
            raise UsageError(
                f"--dashboard-address: port {number} of {host or 'all addresses'} cannot be used "
                f"on {socket.gethostname()}: {error.strerror}. Name another, or leave the option "
                f"out to take any"
            ) from None
