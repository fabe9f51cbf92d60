"""Signals to a rank or a job: the first one ends the run, the second at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NoReturn

from hpcdask.bootstrap import ranks
from hpcdask.process import ENDING, PASSED_ON, SAME_SIGNAL_S, process_start


class Signals:
    """Signals, and the end of the MPI launcher.

    ``leave`` ends this process at once, with an exit code; ``pass_on`` takes signals that are for
    the program.
    """

    def __init__(
        self, leave: Callable[[int], NoReturn], pass_on: Callable[[int], None] = lambda number: None
    ) -> None:
        self._leave, self._pass_on = leave, pass_on
        self._without_launcher: Callable[[], None]
        self._launcher_fd: int | None = None
        self._over = False

    def handle(self, act: Callable[[int], None], repeated: Collection[int] = frozenset()) -> None:
        """Call `act` for the first signal that ends the run; the second ends this process at once.

        Of those that may be `repeated`, each is told to `act`, and none ends the process.
        """
        loop = asyncio.get_running_loop()
        first: list[float] = []

        def handle(number: int) -> None:
            if number in repeated:
                act(number)
            elif not first:
                first.append(time.monotonic())
                act(number)
            elif time.monotonic() - first[0] > SAME_SIGNAL_S:
                self._leave(128 + number)

        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a shell's `&`
                loop.add_signal_handler(number, handle, number)
        for number in PASSED_ON:
            loop.add_signal_handler(number, self._pass_on, number)
        self.watch_launcher(partial(handle, signal.SIGTERM))

    def watch_launcher(self, act: Callable[[], None]) -> None:
        """Call `act`, or the one of a later call, when the MPI launcher is gone.

        If it was killed, Open MPI's ends nobody, and nobody reads what is said.
        """
        self._without_launcher, launcher = act, ranks.mpi_launcher()
        if launcher is None or self._launcher_fd is not None:
            return
        loop, (pid, start) = asyncio.get_running_loop(), launcher
        try:
            self._launcher_fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it is gone already
            pass
        except (OSError, AttributeError):  # an old kernel, or a Python made for one (conda)
            return
        if self._launcher_fd is None or process_start(pid) != start:
            loop.call_soon(self._lose_launcher)
        else:
            loop.add_reader(self._launcher_fd, self._lose_launcher)

    def forget_launcher(self) -> None:
        """The run is over: that the launcher ends means nothing any more."""
        self._over = True

    def _lose_launcher(self) -> None:
        if self._launcher_fd is not None:
            asyncio.get_running_loop().remove_reader(self._launcher_fd)
        if not self._over:
            self._without_launcher()
