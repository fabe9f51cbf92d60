"""Lets clients of other processes into one's clusters of jobs."""

from __future__ import annotations

from collections.abc import Mapping

from distributed import Security

from hpcdask.security.credentials import load_credentials, to_security

from .folder import list_clusters


def load_security(info: Mapping[str, str]) -> Security | None:
    """Return the keys for ``Client(address)``: a ``distributed.client.security-loader``.

    For a client in another process than the cluster's, such as the kernel of a notebook beside
    JupyterLab's Dask extension. The keys are in the cluster's folder, which only its user can read.
    With a fixed port, clusters that are over had the same address: the newest that is not counts.
    None when no cluster of this user that the usual base knows has the address in `info`. Raises
    SchedulerFileError if others can read its keys.
    """
    address = info.get("address")
    for folder in reversed(list_clusters()):
        if folder.ended is None and any(
            f" {address} " in script.read_text() for script in folder.path.glob("script*.sh")
        ):
            return to_security(load_credentials(str(folder.keys)))
    return None
