"""Lets clients of other processes into one's clusters of jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcdask.security.credentials import load_credentials, to_security

from .folder import base_path

if TYPE_CHECKING:
    from distributed import Security

__all__ = ["load_security"]


def load_security(info: Mapping[str, str]) -> Security | None:
    """Return the keys for ``Client(address)``: a ``distributed.client.security-loader``.

    For a client in another process than the cluster's, such as the kernel of a notebook beside
    JupyterLab's Dask extension. The keys are in the cluster's folder, which only its user can read.
    None when no cluster of this user that the usual base knows has the address in `info`. Raises
    SchedulerFileError if the cluster has ended, or others can read its keys.
    """
    for script in base_path(None).glob("*/script*.sh"):  # one for each group
        try:
            is_it = f" {info.get('address')} " in script.read_text()
        except OSError:  # of a cluster that ends right now
            continue
        if is_it:
            keys = load_credentials(str(script.parent / "keys"))
            return to_security(keys)
    return None
