"""The HTTP servers of scheduler and workers: small requests, no way to elsewhere.

They have no password, so whoever reaches their port can send them anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import dask.config
from distributed.http.routing import DirectoryHandler
from tornado import web
from tornado.httputil import HTTPServerRequest

from hpcdask.upstream import distributed

#: Bytes of a request's body, and of what is kept of a connection that is not read. No request that
#: these servers answer has a body.
BODY_NBYTES = 2**16
#: Seconds for the headers of a request, the first or the next one, and for its body.
REQUEST_S = 30.0
#: distributed's routes from the dashboard to other HTTP servers, which may reach any port.
PROXY = "distributed.http.proxy"
_ROUTES = ("distributed.scheduler.http.routes", "distributed.worker.http.routes")
_ORIGINS = "distributed.scheduler.dashboard.bokeh-application.allow_websocket_origin"


@contextlib.contextmanager
def without_proxy() -> Iterator[None]:
    """Leave the proxy out of the HTTP servers that are made in this block."""
    kept = {name: [one for one in dask.config.get(name) if one != PROXY] for name in _ROUTES}
    with dask.config.set(kept):
        yield


def guard(server: Any) -> None:
    """Limit what the HTTP server of a scheduler or worker takes."""
    http = server.http_server
    http.max_buffer_size = http.conn_params.max_body_size = BODY_NBYTES
    http.conn_params.header_timeout = http.conn_params.body_timeout = REQUEST_S
    application = server.http_application
    find = application.find_handler

    def find_handler(request: HTTPServerRequest, **kwargs: Any) -> Any:
        if _is_of_another_site(request):
            return application.get_handler_delegate(request, web.ErrorHandler, {"status_code": 403})
        if (host := _host(request.headers.get("Host", ""))) not in _own_names(host):
            return application.get_handler_delegate(request, StrangeName, {"host": host})
        return find(request, **kwargs)

    application.find_handler = find_handler


def _host(netloc: str) -> str:
    with contextlib.suppress(ValueError):  # a bracket too many
        return (urlsplit(f"//{netloc}").hostname or "").rstrip(".")
    return "?"


def _is_of_another_site(request: HTTPServerRequest) -> bool:
    """Return whether a page of another site opens a websocket: browsers let it, and name the site.

    A user who configured origins gets them; Bokeh checks those.
    """
    origin = request.headers.get("Origin")
    if origin is None or request.headers.get("Upgrade", "").lower() != "websocket":
        return False
    if dask.config.get(_ORIGINS, ["*"]) != ["*"]:
        return False
    return urlsplit(origin).netloc.lower() != request.headers.get("Host", "").lower()


def _own_names(host: str) -> set[str]:
    """Return the names that this server answers to, with `host` where that cannot be a stranger's.

    A page of another site may point its own name at this address (DNS rebinding), but cannot choose
    an address. Proxies pass on their own names: those that are configured as origins, or any where
    the dashboard's links go through Jupyter's proxy.
    """
    names = {"", "localhost", socket.gethostname().lower(), _full_name()}
    names |= {_host(origin) for origin in dask.config.get(_ORIGINS, ["*"])}
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        names.add(host)
    if "/proxy/" in dask.config.get("distributed.dashboard.link", ""):
        names.add(host)
    return names


@functools.cache
def _full_name() -> str:
    return socket.getfqdn().lower()


class StrangeName(web.RequestHandler):
    """Says which name was asked for, and how it becomes one of this server's."""

    def initialize(self, host: str) -> None:
        """Keep the name."""
        self._host = host

    def prepare(self) -> None:
        """Answer any request."""
        self.set_status(403)
        self.set_header("Content-Type", "text/plain")
        self.finish(
            f"{self._host} is none of the names of {socket.gethostname()}. If a proxy of yours has "
            f"this name, list it in Dask's configuration before the cluster starts: {_ORIGINS}; "
            f"for Jupyter's proxy, set distributed.dashboard.link to "
            f"{{JUPYTERHUB_SERVICE_PREFIX}}/proxy/{{port}}/status\n"
        )


class LazyDashboard(web.RequestHandler):
    """Loads Bokeh (half a second) when somebody first looks, not while workers start."""

    def initialize(self, scheduler: Any) -> None:
        """Keep whose dashboard it is."""
        self._scheduler = scheduler

    async def get(self, *args: str) -> None:
        """Put the real dashboard in place of this handler, and send the browser there again."""
        try:
            await load_dashboard(self._scheduler)
        except ImportError:
            raise web.HTTPError(
                404, reason="the dashboard needs bokeh: pip install bokeh"
            ) from None
        # two slashes would begin the name of another host
        self.redirect("/" + re.sub(r"^[/\\]+", "", self.request.uri or "status"))


class Sitemap(DirectoryHandler):
    """All pages, those of Bokeh as well: distributed's own fails with them (as of 2026.7)."""

    def initialize(self, scheduler: Any) -> None:
        """Keep whose pages they are."""
        self._scheduler = scheduler

    async def get(self) -> None:
        """List them."""
        with contextlib.suppress(ImportError):
            await load_dashboard(self._scheduler)
        paths: set[str] = set()
        main = self._scheduler.http_application
        for application in (main, *main.applications):
            if hasattr(application, "app_paths"):
                paths |= set(application.app_paths)
            else:
                paths |= distributed.paths(application.default_router)
        self.write({"paths": sorted(paths)})


def add_lazy_dashboard(scheduler: Any) -> None:
    """Load the dashboard of a scheduler that was made without one at the first look."""
    application = scheduler.http_application
    if not any(hasattr(one, "app_paths") for one in application.applications):
        lazy = web.Application([(r"/.*", LazyDashboard, {"scheduler": scheduler})])
        application.add_application(lazy)
    # before distributed's own, which knows every host's by a pattern
    application.add_handlers(r".*\Z", [(r"/sitemap\.json", Sitemap, {"scheduler": scheduler})])
    rules = application.default_router.rules
    rules.insert(0, rules.pop(-2))


async def load_dashboard(scheduler: Any) -> None:
    """Put distributed's dashboard in the place of the lazy one.

    Raises ImportError if there is no Bokeh that fits.
    """
    application = scheduler.http_application

    def lazy() -> list[web.Application]:
        return [
            one
            for one in application.applications
            if any(rule.target is LazyDashboard for rule in one.wildcard_router.rules)
        ]

    if lazy():
        await asyncio.get_running_loop().run_in_executor(None, _load_bokeh)
    for one in lazy():
        application.applications.remove(one)
        from distributed.dashboard import scheduler as dashboard

        dashboard.connect(application, scheduler.http_server, scheduler, prefix="/")


def _load_bokeh() -> None:
    import distributed.dashboard.scheduler  # noqa: F401
