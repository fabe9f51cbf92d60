"""The scheduler of a cluster of jobs: who may reach it, where it listens, and its dashboard."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import dask.config
from distributed import Scheduler, Security, rpc
from distributed.comm import get_address_host
from distributed.utils import format_dashboard_link

from hpcdask.gpu.monitor import GpuMonitor, refresh, usage_lines
from hpcdask.node.scratch import scratch_folder
from hpcdask.process import make_observable, owner_text, raise_descriptor_limit
from hpcdask.security import ports, private, webserver
from hpcdask.security.credentials import (
    FILES,
    Credentials,
    create_credentials,
    save_credentials,
    to_security,
)
from hpcdask.security.tls import ClusterSecurity
from hpcdask.upstream import distributed as upstream
from hpcdask.upstream.dask import cull_by_layer

from .keywords import check_interface
from .options import NO_ADDRESS

LOOPBACK = "127.0.0.1"


def read_scheduler_options(
    given: dict[str, Any] | None,
    config_name: str,
    interface: str | None,
    *,
    local: bool,
    on_node: bool = False,
) -> dict[str, Any]:
    """The keywords of the scheduler: as given, else those of the section, and where it listens.

    If it will run `on_node`, its interface cannot be looked for here.
    """
    configured = dask.config.get(f"jobqueue.{config_name}.scheduler-options", None)
    chosen = dict(configured or {}) if given is None else dict(given)
    if "host" not in chosen:
        chosen.setdefault("interface", interface)
        if local and chosen["interface"] is None:
            chosen["host"] = LOOPBACK
        what = "interface" if chosen["interface"] == interface else "scheduler_options"
        if not on_node:
            check_interface(chosen["interface"], what)
    return chosen


@dataclass(eq=False)
class ClusterScheduler:
    """A scheduler in the event loop of its cluster; `server` is None before the start.

    `options` come from `read_scheduler_options`. `asked` is credentials of one's own, or False for
    none; otherwise new ones are made. `local` tells whether all workers are on this machine. Before
    the start `address` is what stands for it in a preview.
    """

    scheduler_cls: type[Scheduler]
    options: dict[str, Any]
    asked: Security | bool | None
    local: bool
    say: Callable[[str], None]
    port_range: str | None = None
    server: Scheduler | None = None
    address: str = NO_ADDRESS
    security: Security = field(default_factory=Security)
    _scratch: str = ""

    def save_keys(self, folder: str) -> None:
        """Make the credentials, and save what workers need of them in `folder`."""
        credentials = self._credentials()
        shared = {name: text for name, text in credentials.items() if "scheduler" not in name}
        if shared:
            save_credentials(shared, folder)

    def _credentials(self) -> Credentials:
        """Set `security`, and return the workers' keys. The user's are files or texts, as given."""
        asked = self.asked
        if asked is False:
            self.say("warning: security=False: any user who reaches a port of it runs code as you")
            return {}
        if isinstance(asked, Security):
            self.security = ClusterSecurity.of(asked) if type(asked) is Security else asked
            fields = FILES.values()
            given = {field: getattr(asked, field) for field in fields if getattr(asked, field)}
            return {field: _text(value) for field, value in given.items()}
        made = create_credentials()
        self.security = to_security(made)
        return made

    async def start(self) -> None:
        """Start the scheduler, and its dashboard once somebody looks at it."""
        raise_descriptor_limit()
        with ports.within(self.port_range):
            server = await self._start()
        self.address = server.address
        if not self.local and get_address_host(self.address) in (LOOPBACK, "::1"):
            self.say(
                f"warning: the scheduler listens at {self.address}, which other nodes cannot "
                f'reach: name this machine\'s network with scheduler_options={{"interface": "…"}}'
            )

    async def _start(self) -> Scheduler:
        # the default port of the dashboard may be taken
        with warnings.catch_warnings(), webserver.without_proxy():
            warnings.filterwarnings("ignore", message="Port .* is already in use")
            self.server = self.scheduler_cls(
                **{
                    "protocol": "tls" if self.security.require_encryption else "tcp",
                    "security": self.security,
                    "port": 0,
                    "dashboard": False,
                    "dashboard_address": f"{LOOPBACK}:{0 if self.port_range else 8787}",
                    "local_directory": self._scratch,
                    **self.options,
                }
            )
        webserver.guard(self.server)
        webserver.add_lazy_dashboard(self.server)
        self.server.add_plugin(GpuMonitor(self.server))
        cull_by_layer()
        await self.server
        return self.server

    def connect(self) -> rpc:
        """A connection to the scheduler, for distributed's side of the cluster."""
        access: Any = self.security.get_connection_args("client")
        return rpc(self.address, connection_args=access)

    async def close(self) -> None:
        """Close the scheduler if it was started. Its workers end as well."""
        if self.server is not None:
            await refresh(self.server)
            for line in usage_lines(self.server):
                self.say(line)
            await self.server.close(reason="the cluster is closed")

    def make_scratch(self) -> None:
        """Make its folder: distributed's usual one, on sys.path as well, may be another user's."""

        def announce(path: str) -> None:
            self._scratch = path

        scratch_folder(None, announce)
        make_observable()

    def remove_scratch(self) -> None:
        """Remove what the scheduler had on this machine's disk."""
        if self._scratch:
            private.remove(self._scratch, owner_text())

    def leave_to_parent(self) -> None:
        """In a child that was forked: what the scheduler has on disk stays."""
        upstream.leave_folder(self.server)

    # The dashboard

    def dashboard_link(self) -> str:
        """Where the dashboard is if it listens on this machine only; else empty."""
        web = self._web_server()
        if web is None or web.address not in (LOOPBACK, "::1"):
            return ""
        return str(format_dashboard_link(web.address, web.port))

    def tunnel(self) -> str:
        """The command that brings the dashboard to the user's machine; empty if none is needed."""
        web = self._web_server()
        if self.local or web is None or web.address != LOOPBACK:
            return ""
        return f"ssh -L {web.port}:{LOOPBACK}:{web.port} {socket.gethostname()}"

    def _web_server(self) -> Any:
        return None if self.server is None else self.server.http_server


def _text(value: str) -> str:
    """PEM text: given as such, or the path of a file."""
    if "\n" in value:
        return value
    with open(value) as file:
        return file.read()
