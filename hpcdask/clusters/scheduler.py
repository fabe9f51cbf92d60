"""The scheduler of a cluster of jobs: who may reach it, where it listens, and its dashboard."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed import Scheduler, Security
from distributed.comm import get_address_host
from distributed.utils import format_dashboard_link, get_ip

from hpcdask.comm.fabric import only_address, unreachable
from hpcdask.gpu.monitor import GpuMonitor
from hpcdask.process import raise_descriptor_limit
from hpcdask.security import ports, webserver
from hpcdask.security.credentials import (
    FIELDS,
    create_credentials,
    save_credentials,
    to_security,
)
from hpcdask.security.nearby import NearbySecurity
from hpcdask.upstream.distributed import cull_by_layer

from .options import LOOPBACK, ClusterOptions


def make_security(
    asked: Security | bool | None, keys_path: str, say: Callable[[str], None]
) -> Security:
    """Return the security of a scheduler, and save in a file what workers need of it."""
    if asked is False:
        say("warning: security=False: any user who reaches a port of it runs code as you")
        return NearbySecurity()
    if isinstance(asked, Security):
        security = NearbySecurity.of(asked) if type(asked) is Security else asked
        given = {name: value for name in FIELDS if (value := getattr(asked, name))}
        # texts, or paths of files
        keys = {name: pem if "\n" in pem else Path(pem).read_text() for name, pem in given.items()}
    else:
        keys = create_credentials()
        security = to_security(keys)
    if keys:
        shared = {name: text for name, text in keys.items() if "scheduler" not in name}
        save_credentials(shared, keys_path)
    return security


async def start_scheduler(options: ClusterOptions, security: Security, scratch: str) -> Scheduler:
    """Start a scheduler, and its dashboard once somebody looks at it."""
    raise_descriptor_limit()
    asked, port_range = dict(options.scheduler), next(iter(options.groups.values())).spec.port_range
    chosen = options.queue.is_local or asked.get("host") or asked.get("interface")
    if not chosen and (address := only_address(own := get_ip())) != own:
        asked["host"] = address
    keywords = {
        "protocol": "tls" if security.require_encryption else "tcp",
        "security": security,
        "port": 0,
        "dashboard": False,
        "dashboard_address": f"{LOOPBACK}:{0 if port_range else 8787}",
        "local_directory": scratch,
        **asked,
    }
    with ports.within(port_range):
        # the default port of the dashboard may be taken
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Port .* is already in use")
            scheduler = options.scheduler_cls(**keywords)
        webserver.guard(scheduler)
        webserver.add_lazy_dashboard(scheduler)
        scheduler.add_plugin(GpuMonitor())
        cull_by_layer()
        await scheduler
    return scheduler


def locate(scheduler: Scheduler, *, is_local: bool, say: Callable[[str], None]) -> tuple[str, str]:
    """Return the dashboard's address, and the command that brings it to the user's machine.

    The command is empty where none is needed, and both are if there is no dashboard. Says whether
    nodes may fail to reach the scheduler.
    """
    host = get_address_host(scheduler.address)
    remedy = 'scheduler_options={"interface": "…"}'
    if not is_local and (warning := unreachable(host, remedy)):
        say(warning)
    web: Any = scheduler.http_server
    if web is None:
        return "", ""
    shown = web.address if web.address in (LOOPBACK, "::1") else host
    try:
        link = str(format_dashboard_link(shown, web.port))
    except KeyError as error:
        link = f"http://{shown}:{web.port}/status"
        say(
            f"warning: distributed.dashboard.link of Dask's configuration names {error.args[0]}, "
            f"which is not set here, so the plain address is shown"
        )
    if is_local or web.address != LOOPBACK:
        return link, ""
    return link, f"ssh -L {web.port}:{LOOPBACK}:{web.port} {socket.gethostname()}"
