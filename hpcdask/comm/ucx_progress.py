"""Drives UCX from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import distributed_ucxx.ucxx as base

from hpcdask.upstream import ucxx as upstream

#: Seconds after which UCX is looked at even if it reported nothing.
SAFETY_S = 0.1


class Progress:
    """Drives this process's one UCX worker from its event loop.

    While somebody polls, UCX is progressed on each turn of the loop. Else it is armed, and its file
    descriptor wakes the loop: an idle connection costs no processor time.
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._loop = asyncio.get_running_loop()
        self._asleep: dict[Any, asyncio.Future[None]] = {}
        self._pollers = 0
        self._polls = False
        self._timer: asyncio.TimerHandle | None = None
        upstream.keep_running()
        # in the place of ucxx's reader, which does not arm UCX again
        self._loop.add_reader(worker.epoll_file_descriptor, self.turn)
        self.turn()

    @contextlib.contextmanager
    def polling(self) -> Iterator[None]:
        """Progress UCX on every turn of the loop until the end of the block."""
        self._pollers += 1
        if not self._polls:
            self._polls = True
            self._loop.call_soon(self._poll)
        try:
            yield
        finally:
            self._pollers -= 1

    def _poll(self) -> None:
        self._progress()
        if self._pollers:
            self._loop.call_soon(self._poll)
        else:
            self._polls = False
            self._arm()

    async def wait(self, request: Any) -> None:
        """Wait for the end of a request of ucxx; raises what UCX says of it."""
        if not request.completed:
            self._progress()
        if not request.completed:
            future = self._asleep[request] = self._loop.create_future()
            if not self._polls:
                self._arm()
            try:
                await future
            finally:
                self._asleep.pop(request, None)
        request.check_error()

    def _progress(self) -> None:
        self.worker.progress()
        self.look()

    def look(self) -> None:
        """Wake those whose request is over."""
        for request, future in self._asleep.items():
            if request.completed and not future.done():
                future.set_result(None)

    def turn(self) -> None:
        """Progress UCX once."""
        self._progress()
        if not self._polls:
            self._arm()

    def _arm(self) -> None:
        """Make UCX report what comes next, and look again after a while all the same."""
        if not self.worker.arm():  # something has come already
            self._loop.call_soon(self.turn)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(SAFETY_S, self.turn)


_progress: dict[asyncio.AbstractEventLoop, Progress] = {}


def progress() -> Progress:
    """The driver of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _progress:
        for other in [other for other in _progress if other.is_closed()]:
            del _progress[other]
        upstream.start()
        _progress[loop] = Progress(upstream.worker())
    return _progress[loop]


class Endpoint:
    """Messages of known size over one of ucxx's endpoints."""

    def __init__(self, endpoint: Any) -> None:
        self._array = upstream.array_type()
        self._raw = upstream.raw(endpoint)
        self._send_tag, self._receive_tag = upstream.tags(endpoint)
        self._progress = progress()

    def send(self, buffer: Any) -> Any:
        """Begin to send; `wait` for the request that is returned."""
        self._raw.raise_on_error()
        return self._raw.tag_send(self._array(buffer), self._send_tag)

    def receive(self, buffer: Any) -> Any:
        """Begin to receive exactly as many bytes as the buffer holds."""
        array = self._array(buffer)
        if self._raw.alive:
            return self._raw.tag_recv(array, self._receive_tag)
        # the other side is gone; what it said last may lie here
        worker = self._progress.worker
        lies = worker.tag_probe(self._receive_tag)
        if lies.matched and lies.length == array.nbytes:
            found = worker.tag_probe(self._receive_tag, remove=True)
            return worker.tag_recv_with_handle(array, found)
        self._raw.raise_on_error()
        raise base.ucxx.exceptions.UCXCloseError("the other side closed the connection")

    async def wait(self, *requests: Any) -> None:
        """Wait for the end of all requests."""
        for request in requests:
            await self._progress.wait(request)

    async def wait_polling(self, *requests: Any, seconds: float) -> None:
        """Wait for requests that end soon: poll first."""
        if all(request.completed for request in requests):
            return await self.wait(*requests)
        with self._progress.polling(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.wait(*requests)
        return await self.wait(*requests)

    def look(self) -> None:
        """Wake those that wait for requests which were cancelled."""
        self._progress.look()
