"""HTTP servers without a password: small requests, by the server's own names."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import ipaddress
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import dask.config
from tornado import web
from tornado.httputil import HTTPServerRequest

#: Bytes of a request's body, and of what is kept of a connection that is not read. No request that
#: these servers answer has a body.
BODY_NBYTES = 2**16
#: Seconds for the headers of a request, the first or the next one, and for its body.
REQUEST_S = 30.0
#: Origins that Bokeh is to check.
ORIGINS = "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin"
#: distributed's routes from the dashboard to other HTTP servers, which may reach any port.
PROXY = "distributed.http.proxy"
_full_name = functools.cache(socket.getfqdn)


def guard(server: Any) -> None:
    """Limit what the HTTP server of a scheduler or worker takes."""
    http = server.http_server
    http.max_buffer_size = http.conn_params.max_body_size = BODY_NBYTES
    http.conn_params.header_timeout = http.conn_params.body_timeout = REQUEST_S
    application = server.http_application
    find = application.find_handler

    def find_handler(request: HTTPServerRequest, **kwargs: Any) -> Any:
        if _reason_against(request):
            return application.get_handler_delegate(request, _Refusal)
        found = find(request, **kwargs)
        if found.handler_class.__module__ == PROXY:
            return application.get_handler_delegate(request, web.ErrorHandler, {"status_code": 404})
        return found

    application.find_handler = find_handler


class _Refusal(web.RequestHandler):
    """Answer 403 to a request, with the reason."""

    def prepare(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain")
        self.finish(_reason_against(self.request))


def _reason_against(request: HTTPServerRequest) -> str:
    """Return why a request is refused; empty if no page of another site can be behind it."""
    netloc, origin = request.headers.get("Host", "").lower(), request.headers.get("Origin")
    if not _is_own_name(host := _host(netloc)):
        return (
            f"{host} is none of the names of {socket.gethostname()}. If a proxy of yours has this "
            f"name, list it in Dask's configuration before the cluster starts: {ORIGINS}; for "
            f"Jupyter's proxy, set distributed.dashboard.link to "
            f"{{JUPYTERHUB_SERVICE_PREFIX}}/proxy/{{port}}/status\n"
        )
    if origin is None or request.headers.get("Upgrade", "").lower() != "websocket":
        return ""
    # browsers let any page open a websocket; what the user allows, Bokeh checks
    if dask.config.get(ORIGINS, ["*"]) != ["*"] or urlsplit(origin).netloc.lower() == netloc:
        return ""
    return "a page of another site asks for a websocket\n"


def _host(netloc: str) -> str:
    """Return the name or address in a Host header, "?" where it is none."""
    found = re.fullmatch(r"\[([^\[\]]+)\](?::\d*)?|([^:\[\]]*)(?::\d*)?", netloc)
    return (found[1] or found[2]).lower().rstrip(".") if found else "?"


def _is_own_name(host: str) -> bool:
    """Return whether a name or address cannot be that of a site which leads here.

    A page of another site may point its own name here (DNS rebinding), but cannot choose an
    address. Proxies pass on their own names: configured origins, or any with Jupyter's proxy.
    """
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    if "/proxy/" in dask.config.get("distributed.dashboard.link", ""):
        return True
    own = {"", "localhost", socket.gethostname().lower(), _full_name().lower()}
    return host in own or host in map(_host, dask.config.get(ORIGINS, ["*"]))


def add_lazy_dashboard(scheduler: Any) -> None:
    """Give a scheduler that was made without a dashboard one that loads at the first look."""
    main = scheduler.http_application
    if not main.applications:
        main.add_application(web.Application([(r"/.*", LazyDashboard)], scheduler=scheduler))


class LazyDashboard(web.RequestHandler):
    """Dashboard that loads Bokeh (half a second) at the first look, not while workers start."""

    async def get(self) -> None:
        """Put distributed's dashboard in the place of this one, and send the browser there."""
        name = "distributed.dashboard.scheduler"
        try:
            dashboard = await asyncio.to_thread(importlib.import_module, name)
        except ImportError:
            raise web.HTTPError(
                404, reason="the dashboard needs bokeh: pip install bokeh"
            ) from None
        scheduler = self.settings["scheduler"]
        main = scheduler.http_application
        if self.application in main.applications:  # else another request has put it there
            main.applications.remove(self.application)
            dashboard.connect(main, scheduler.http_server, scheduler, prefix="/")
        # two slashes would begin the name of another host
        self.redirect("/" + re.sub(r"^[/\\]+", "", self.request.uri or "status"))
