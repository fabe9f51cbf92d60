"""connect(), and Client() without arguments."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dask.config

from hpcdask.errors import SchedulerFileError
from hpcdask.process import make_observable
from hpcdask.queues.registry import job_id
from hpcdask.security.credentials import load_credentials, to_security

from .defaults import for_devices, prompt_clients, suit_devices, suit_hosts
from .scheduler_file import VARIABLE, endpoint, read

if TYPE_CHECKING:
    from distributed import Client, Security

#: The scheduler file of the run of which this process is the program.
_own_file = ""
_LOADER = f"{__name__}.load_security"
_VARIABLES = (VARIABLE, "DASK_SCHEDULER_ADDRESS", "DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER")


def configure_client(address: str, file: str, *, on_gpus: bool = False) -> None:
    """Make ``Client()`` connect to this cluster in this process."""
    global _own_file
    _own_file = file
    if on_gpus:
        suit_devices()
    found = {"scheduler-address": address, "distributed.client.security-loader": _LOADER}
    dask.config.set({**found, **prompt_clients()})
    make_observable()


def program_variables(address: str, file: str, *, on_gpus: bool) -> dict[str, str]:
    """Return the variables with which ``Client()`` in a program connects to this cluster."""
    found = dict(zip(_VARIABLES, (file, address, _LOADER), strict=True))
    return found | (for_devices() if on_gpus else {})


def forget_client() -> None:
    """Undo `configure_client`: the cluster has ended, and its files are gone."""
    global _own_file
    _own_file = ""
    suit_hosts()
    dask.config.set({"scheduler-address": None, "distributed.client.security-loader": None})


def connect(
    path: str | None = None, *, timeout: float = 30.0, asynchronous: bool = False, **options: Any
) -> Client:
    """Connect to the cluster that a scheduler file names.

    Parameters
    ----------
    path
        The file; by default the one that ``HPCDASK_SCHEDULER_FILE`` names.
    timeout
        Seconds to wait for the scheduler's answer.
    asynchronous
        Return an awaitable of the client, for programs that run in an event loop.
    **options
        As of `distributed.Client`.

    Raises
    ------
    SchedulerFileError
        The file is missing, foreign or stale (its cluster does not answer).
    """
    from distributed import Client

    options |= {"timeout": timeout, "asynchronous": asynchronous}

    def make(address: str, access: Security) -> Client:
        with dask.config.set(prompt_clients()):
            return Client(address, security=access, **options)

    async def make_in_loop() -> Client:
        client: Client = await make(*await asyncio.to_thread(_reach, path))
        return client

    if asynchronous:
        return make_in_loop()  # type: ignore[return-value]
    return make(*_reach(path))


def _reach(path: str | None) -> tuple[str, Security]:
    """Return the address and keys of a cluster that answers; else raise SchedulerFileError."""
    path = os.path.expanduser(path or os.environ.get(VARIABLE, ""))
    if not path:
        raise SchedulerFileError(f"no scheduler file: give its path, or set {VARIABLE}")
    content = _read_ready(path)
    own = content["hpcdask"]
    access = to_security(load_credentials(own["keys"]) if own.get("keys") else None)
    if own.get("gpus"):
        suit_devices()
    try:
        # Client would try for its whole timeout; the scheduler would miss the TLS handshake
        with socket.create_connection(endpoint(content["address"]), timeout=5) as sock:
            if access.require_encryption:
                context = access.get_connection_args("client")["ssl_context"]
                context.wrap_socket(sock).close()
    except OSError as error:
        raise SchedulerFileError(
            f"the cluster of {os.path.abspath(path)} does not answer at {content['address']}: it "
            f"has ended, or its node {own.get('host')} cannot be reached from here. Remove the "
            f"file if it is stale ({type(error).__name__}: {error})"
        ) from None
    return content["address"], access


def load_security(info: Mapping[str, str]) -> Security | None:
    """Return the keys for plain ``Client()``: a ``distributed.client.security-loader``.

    The runner configures it for the user's program. Elsewhere, set ``scheduler-address`` and
    ``distributed.client.security-loader: hpcdask.client.connect.load_security`` in Dask's
    configuration and ``HPCDASK_SCHEDULER_FILE`` in the environment. None if the address in `info`
    is not that of the file's cluster.
    """
    global _own_file
    path = _own_file or os.environ.get(VARIABLE)
    if not path:
        return None
    content = read(path)
    if content["address"] != info.get("address"):
        return None
    if all(name in os.environ for name in _VARIABLES):  # not for the jobs it submits
        if (job := content["hpcdask"].get("job")) != job_id():
            raise SchedulerFileError(
                f"the variables of the run in job {job or 'none'} came into this job with sbatch "
                f"--export=ALL or its like: unset {' '.join(_VARIABLES)} in its script"
            )
        _own_file = path
        for name in _VARIABLES:
            os.environ.pop(name, None)
        dask.config.set(prompt_clients())
        make_observable()
    keys = _read_ready(path)["hpcdask"].get("keys")
    return to_security(load_credentials(keys) if keys else None)


def _read_ready(path: str) -> dict[str, Any]:
    """Read a scheduler file once its workers are up; raise SchedulerFileError if they are late."""
    started = time.monotonic()
    while (content := read(path))["hpcdask"].get("ready") is False:
        if time.monotonic() > started + content["hpcdask"]["timeout"]:
            raise SchedulerFileError(
                f"the workers of {path} did not come up: see what the run says"
            )
        time.sleep(0.02)
    return content
