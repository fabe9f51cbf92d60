"""The scheduler of a cluster of jobs: who may reach it, where it listens, and its dashboard."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distributed import Scheduler, Security
from distributed.comm import get_address_host
from distributed.core import Status
from distributed.utils import format_dashboard_link, get_ip

from hpcdask.comm.fabric import only_address, unreachable
from hpcdask.gpu.monitor import GpuMonitor, monitor_of, usage_lines
from hpcdask.node.scratch import scratch_folder
from hpcdask.process import make_observable, owner_text, raise_descriptor_limit
from hpcdask.security import ports, private, webserver
from hpcdask.security.credentials import (
    FIELDS,
    create_credentials,
    save_credentials,
    to_security,
)
from hpcdask.security.nearby import NearbySecurity
from hpcdask.upstream.distributed import cull_by_layer

from .options import LOOPBACK, NO_ADDRESS, ClusterOptions


@dataclass(eq=False)
class ClusterScheduler:
    """Scheduler in the event loop of its cluster; `server` is None before the start.

    `tunnel` is the command that brings the dashboard to the user's machine; empty where none is
    needed.
    """

    options: ClusterOptions
    say: Callable[[str], None]
    server: Scheduler | None = None
    address: str = NO_ADDRESS
    dashboard_link: str = ""
    tunnel: str = ""
    security: Security = field(default_factory=NearbySecurity)
    _scratch: str = ""

    def save_keys(self, folder: str) -> None:
        """Set `security`, and save what workers need of it in `folder`."""
        asked, keys = self.options.security, dict[str, str]()
        if asked is False:
            self.say("warning: security=False: any user who reaches a port of it runs code as you")
        elif isinstance(asked, Security):
            self.security = NearbySecurity.of(asked) if type(asked) is Security else asked
            given = {name: getattr(asked, name) for name in FIELDS}
            keys = {name: _pem(value) for name, value in given.items() if value}
        else:
            keys = create_credentials()
            self.security = to_security(keys)
        if keys:
            shared = {name: text for name, text in keys.items() if "scheduler" not in name}
            save_credentials(shared, folder)

    async def start(self) -> None:
        """Start the scheduler, and its dashboard once somebody looks at it."""
        raise_descriptor_limit()
        asked, ports_of = self.options.scheduler, self.options.port_range
        local, found = self.options.queue.is_local, dict[str, str]()
        chosen = asked.get("host") or asked.get("interface")
        if not (local or chosen) and (address := only_address(own := get_ip())) != own:
            found["host"] = address
        options = {
            "protocol": "tls" if self.security.require_encryption else "tcp",
            "security": self.security,
            "port": 0,
            "dashboard": False,
            "dashboard_address": f"{LOOPBACK}:{0 if ports_of else 8787}",
            "local_directory": self._scratch,
            **asked,
            **found,
        }
        with ports.within(ports_of):
            # the default port of the dashboard may be taken
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Port .* is already in use")
                self.server = self.options.scheduler_cls(**options)
            webserver.guard(self.server)
            webserver.add_lazy_dashboard(self.server)
            self.server.add_plugin(GpuMonitor())
            cull_by_layer()
            await self.server
        self.address = self.server.address
        host = get_address_host(self.address)
        remedy = 'scheduler_options={"interface": "…"}'
        if not local and (warning := unreachable(host, remedy)):
            self.say(warning)
        web: Any = self.server.http_server
        if web is None:
            return
        shown = web.address if web.address in (LOOPBACK, "::1") else host
        try:
            self.dashboard_link = str(format_dashboard_link(shown, web.port))
        except KeyError as error:
            self.dashboard_link = f"http://{shown}:{web.port}/status"
            self.say(
                f"warning: distributed.dashboard.link of Dask's configuration names "
                f"{error.args[0]}, which is not set here, so the plain address is shown"
            )
        if not local and web.address == LOOPBACK:
            self.tunnel = f"ssh -L {web.port}:{LOOPBACK}:{web.port} {socket.gethostname()}"

    async def close(self) -> None:
        """Close the scheduler if it was started, with its workers, and remove its folder."""
        if self.server is not None and self.server.status != Status.closed:
            await monitor_of(self.server).refresh()
            for line in usage_lines(self.server):
                self.say(line)
            await self.server.close(reason="the cluster is closed")
        if self._scratch:
            private.remove(self._scratch, owner_text())

    def make_scratch(self) -> None:
        """Make its folder: distributed's usual one, on sys.path as well, may be another user's."""
        self._scratch = scratch_folder(None, lambda path: None)
        make_observable()


def _pem(value: str) -> str:
    """Return a PEM text, which is given as such or as the path of a file."""
    if "\n" in value:
        return value
    with open(value) as file:
        return file.read()
