"""connect(), and Client() without arguments."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dask.config

from hpcdask.errors import SchedulerFileError
from hpcdask.security.credentials import load_credentials, to_security

from .batching import prompt_clients
from .defaults import suit_devices, suit_hosts
from .scheduler_file import VARIABLE, endpoint, read

if TYPE_CHECKING:
    from distributed import Client, Security

_VARIABLES = (VARIABLE, "DASK_SCHEDULER_ADDRESS", "DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER")


def configure_client(address: str, file: str, *, on_gpus: bool = False) -> None:
    """Make ``Client()`` with no argument connect to this cluster, in this process and its children.

    `file` is the scheduler file with the key folder; `on_gpus`, whether its workers have GPUs.
    """
    if on_gpus:
        suit_devices()
    loader = f"{__name__}.load_security"
    os.environ.update(dict(zip(_VARIABLES, (file, address, loader), strict=True)))
    found = {"scheduler-address": address, "distributed.client.security-loader": loader}
    dask.config.set({**found, **prompt_clients()})


def forget_client() -> None:
    """Undo `configure_client`: the cluster has ended, and its files are gone."""
    for name in _VARIABLES:
        os.environ.pop(name, None)
    suit_hosts()
    dask.config.set({"scheduler-address": None, "distributed.client.security-loader": None})


def connect(path: str | None = None, *, timeout: float = 30.0, **options: Any) -> Client:
    """Connect to the cluster that a scheduler file names.

    Parameters
    ----------
    path
        The file; by default the one that ``HPCDASK_SCHEDULER_FILE`` names.
    timeout
        Seconds to wait for the scheduler's answer.
    **options
        As of `distributed.Client`.

    Raises
    ------
    SchedulerFileError
        The file is missing, foreign or stale (its cluster does not answer).
    """
    from distributed import Client

    path = os.path.expanduser(path or os.environ.get(VARIABLE, ""))
    if not path:
        raise SchedulerFileError(f"no scheduler file: give its path, or set {VARIABLE}")
    content = read(path)
    own = content.get("hpcdask") or {}
    credentials = load_credentials(own["keys"]) if own.get("keys") else None
    stale = (
        f"the cluster of {os.path.abspath(path)} does not answer at {content['address']}: it has "
        f"ended, or its node {own.get('host')} cannot be reached from here. Remove the file if it "
        f"is stale"
    )
    access = to_security(credentials)
    if own.get("gpus"):
        suit_devices()
    try:
        _knock(content["address"], access)  # Client would try for `timeout`
        with dask.config.set(prompt_clients()):
            return Client(content["address"], security=access, timeout=timeout, **options)
    except OSError as error:
        raise SchedulerFileError(f"{stale} ({type(error).__name__}: {error})") from None


def _knock(address: str, access: Security) -> None:
    """Connect once, with a whole TLS handshake, which the scheduler would miss. Raises OSError."""
    with socket.create_connection(endpoint(address), timeout=5) as sock:
        if access.require_encryption:
            context = access.get_connection_args("client")["ssl_context"]
            context.wrap_socket(sock).close()


def load_security(info: Mapping[str, str]) -> Security | None:
    """Return the keys for plain ``Client()``: a ``distributed.client.security-loader``.

    The runner configures it for the user's program. Elsewhere, set ``scheduler-address`` and
    ``distributed.client.security-loader: hpcdask.client.connect.load_security`` in Dask's
    configuration and ``HPCDASK_SCHEDULER_FILE`` in the environment.

    Parameters
    ----------
    info
        From distributed: the address that a client is about to connect to.

    Returns
    -------
    distributed.Security or None
        None when the address is not that of the file's cluster.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    content = read(path)
    keys = (content.get("hpcdask") or {}).get("keys")
    if content["address"] != info.get("address") or not keys:
        return None
    return to_security(load_credentials(keys))
