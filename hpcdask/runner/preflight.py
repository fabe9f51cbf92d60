"""Bad input that rank 0 finds before the start."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING

from hpcdask.bootstrap import ranks
from hpcdask.errors import HpcdaskError, UsageError

from .options import RunRequest

if TYPE_CHECKING:
    pass


def _check_layout(launch: RunRequest, rank: ranks.Rank) -> None:
    if launch.spec.layout == "dedicated" and rank.size < 3:
        raise UsageError(
            f"--layout dedicated needs at least 3 ranks (scheduler, program, one worker), "
            f"there {'is' if rank.size == 1 else 'are'} {rank.size}: start more with -n, or use "
            f"--layout shared"
        )


def early_error(launch: RunRequest, rank: ranks.Rank) -> HpcdaskError | None:
    """Bad input that only rank 0 can see."""
    from hpcdask.client import scheduler_file

    try:
        _check_layout(launch, rank)
        if launch.program is not None:
            launch.program.check()
        if launch.spec.scheduler_file is not None:
            scheduler_file.check_writable(launch.spec.scheduler_file)
        if launch.spec.dashboard_address:
            _check_port(launch.spec.dashboard_address)
    except HpcdaskError as error:
        return error
    return None


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
