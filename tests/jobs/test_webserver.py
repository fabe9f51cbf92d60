"""The pages of scheduler and workers: the same as distributed's own, within limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import dask
import pytest
from distributed import Scheduler
from distributed.dashboard.scheduler import applications
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse
from tornado.websocket import websocket_connect

from hpcdask.comm.peers import PeerWorker
from hpcdask.security import webserver

LOCAL = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}


@asynccontextmanager
async def scheduler() -> AsyncIterator[Scheduler]:
    """One of ours, as the runner and clusters of jobs make it."""
    made = Scheduler(dashboard=False, **LOCAL)
    webserver.guard(made)
    webserver.add_lazy_dashboard(made)
    async with made:
        yield made


@asynccontextmanager
async def servers() -> AsyncIterator[tuple[Scheduler, PeerWorker]]:
    """A scheduler and a worker of ours."""
    async with scheduler() as ours, PeerWorker(ours.address, host="127.0.0.1") as worker:
        yield ours, worker


async def ask(server: object, path: str, **options: object) -> HTTPResponse:
    url = f"http://127.0.0.1:{server.http_server.port}{path}"
    options = {"request_timeout": 60, "follow_redirects": False} | options
    return await AsyncHTTPClient().fetch(HTTPRequest(url, **options), raise_error=False)


async def answers(server: object, paths: list[str]) -> dict[str, tuple]:
    found = {}
    for path in paths:
        answer = await ask(server, path, follow_redirects=True)
        where = urlsplit(answer.effective_url).path
        found[path] = answer.code, answer.headers.get("Content-Type"), where
    return found


def paths_of(theirs: Scheduler) -> list[str]:
    """All that distributed's own server answers to GET, but for files and parameters."""
    rules = theirs.http_application.wildcard_router.rules
    plain = [rule.matcher.regex.pattern.rstrip("$") for rule in rules]
    plain = [path for path in plain if "(" not in path and path != "/eventstream"]
    assert {"/health", "/metrics", "/info/main/workers.html", "/json/index.html"} <= set(plain)
    more = [
        "/",
        "/status",
        "/individual-progress",
        "/gpu",
        "/nowhere",
        "/statics/css/base.css",
        "/info/worker/unknown.html",
        "/status/",
    ]
    more += ["/static/js/bokeh.min.js", "/individual-plots.json", "/favicon.ico"]
    return [*plain, *more]


@pytest.mark.slow
async def test_pages_are_those_of_distributed_before_and_after_the_first_look():
    async with Scheduler(dashboard=True, **LOCAL) as theirs:
        paths = paths_of(theirs)
        expected = await answers(theirs, paths)
        told = (await ask(theirs, "/individual-plots.json")).body
        pages = [one.app_paths for one in theirs.http_application.applications]
    async with scheduler() as ours:
        for path, answer in expected.items():
            if path in applications and path != "/status":
                continue  # slow to draw
            # each is the first look
            ours.http_application.applications.clear()
            webserver.add_lazy_dashboard(ours)
            assert await answers(ours, [path]) == {path: answer}
        assert await answers(ours, list(expected)) == expected
        assert (await ask(ours, "/individual-plots.json")).body == told
        assert [one.app_paths for one in ours.http_application.applications] == pages


@pytest.mark.parametrize("uri", ["//evil.example/x", "/\\evil.example/x", "///evil.example/x"])
async def test_no_redirect_to_elsewhere(uri):
    async with scheduler() as ours:
        there = await asyncio.open_connection("127.0.0.1", ours.http_server.port)
        there[1].write(f"GET {uri} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        head = (await asyncio.wait_for(there[0].readuntil(b"\r\n\r\n"), 60)).decode()
        there[1].close()
        assert "\r\nLocation: /evil.example/x\r\n" in head


def post(port: int, *, chunked: bool) -> bytes:
    """99 MB, until it hangs up."""
    size = "Transfer-Encoding: chunked" if chunked else "Content-Length: 99000000"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(f"POST /health HTTP/1.1\r\nHost: localhost\r\n{size}\r\n\r\n".encode())
        with suppress(OSError):
            if chunked:
                sock.sendall(b"%x\r\n" % 99_000_000)
            for _ in range(99):
                sock.sendall(bytes(1_000_000))
            return sock.recv(4096)
    return b""


async def test_a_large_body_is_refused_and_not_kept():
    """Also one in pieces, whose header does not say how much there is."""

    def forget_peak() -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) // 1024

    async with servers() as both:
        for server in both:
            for chunked in (False, True):
                forget_peak()
                before = peak()
                port = server.http_server.port
                answer = await asyncio.to_thread(post, port, chunked=chunked)
                assert b" 200 " not in answer
                assert peak() - before < 30, (server, chunked)
            assert (await ask(server, "/health")).code == 200


UPGRADE = (
    b"GET /eventstream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


async def test_a_large_message_of_a_websocket_is_not_kept():
    """Bokeh's own are small; tornado would take 10 MiB of each stranger."""
    async with scheduler() as ours:
        port = ours.http_server.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(UPGRADE)
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        size = 8 * webserver.BODY_NBYTES
        writer.write(b"\x82\xff" + size.to_bytes(8) + bytes(4 + size // 2))
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                assert await reader.read() == b""
        writer.close()


OWN_NAMES = (
    "localhost:9999",  # ssh -L with another port
    "[::1]:8787",
    "10.1.2.3:8787",  # an address, which no site can let lead elsewhere
    socket.gethostname().upper(),
    f"{socket.getfqdn()}.:80",
)
OTHER_NAMES = ("evil.example:8787", "localhost.evil.example", "127.0.0.1.evil.example:8787")


async def test_only_the_server_s_own_names_are_answered():
    """Regression: a site whose name leads to 127.0.0.1 could read all (DNS rebinding)."""
    async with servers() as both:
        for server in both:
            for host in OWN_NAMES + OTHER_NAMES:
                answer = await ask(server, "/health", headers={"Host": host})
                assert answer.code == (200 if host in OWN_NAMES else 403), host
            assert b"allow_websocket_origin" in answer.body


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (webserver.ORIGINS, ["other", "hub.example:443"]),
        ("distributed.dashboard.link", "/user/me/proxy/{port}/status"),
    ],
)
async def test_names_of_a_reverse_proxy_are_configured(key, value):
    async with scheduler() as ours:
        headers = {"Host": "hub.example:443"}
        assert (await ask(ours, "/health", headers=headers)).code == 403
        with dask.config.set({key: value}):
            assert (await ask(ours, "/health", headers=headers)).code == 200


async def dial(
    server: object, origin: str | None, host: str | None = None, path: str = "/eventstream"
) -> int:
    """Ask for a websocket; returns the status code."""
    port = server.http_server.port
    headers = {"Host": host or f"127.0.0.1:{port}"} | ({"Origin": origin} if origin else {})
    try:
        url = f"ws://127.0.0.1:{port}{path}"
        (await websocket_connect(HTTPRequest(url, headers=headers))).close()
    except Exception as error:
        return error.code
    return 101


async def test_websockets_of_other_sites_are_refused():
    """A page of any site may ask the user's browser for one to localhost."""
    async with scheduler() as ours:
        port = ours.http_server.port
        assert await dial(ours, None) == 101
        assert await dial(ours, f"http://127.0.0.1:{port}") == 101
        # by ssh -L with another port
        assert await dial(ours, "http://localhost:9999", "localhost:9999") == 101
        assert await dial(ours, "https://evil.example") == 403
        assert await dial(ours, f"http://127.0.0.1:{port + 1}") == 403
        await ask(ours, "/status")
        assert await dial(ours, "https://evil.example") == 403


async def test_configured_origins_are_for_bokeh_to_check():
    configured = {webserver.ORIGINS: ["hub.example"]}
    async with scheduler() as ours:
        with dask.config.set(configured):
            await ask(ours, "/status")
            assert await dial(ours, "https://hub.example", path="/status/ws") == 101
            assert await dial(ours, "https://evil.example", path="/status/ws") == 403
        assert await dial(ours, "https://hub.example", path="/status/ws") == 403
