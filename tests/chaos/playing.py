"""What the arenas share: firing an episode's events in their order, and taking faults back."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import psutil

from chaos.episodes import Episode, Event

#: Seconds within which a run or a notebook has to get on, on a machine with other work.
PROGRESS_S = 150.0
END_S = 240.0
Undo = Callable[[], object]


class Violation(Exception):
    """Something that must always hold did not."""


class Player:
    """Fires events, and takes back what lasts only for a while.

    Parameters
    ----------
    printed
        What was printed so far, as lines.
    over
        Whether it has ended.
    fire
        Causes a fault; returns what happened, and what takes it back.
    """

    def __init__(
        self,
        printed: Callable[[], list[str]],
        over: Callable[[], bool],
        fire: Callable[[Event], tuple[str, Undo | None]],
    ) -> None:
        self._printed, self._over, self._fire = printed, over, fire
        self._undo: list[tuple[float, Undo]] = []
        self.hits: list[str] = []
        self.fired: list[Event] = []

    def play(self, episode: Episode) -> None:
        """Fire all events whose moment comes before the end."""
        for event in episode.events:
            before = self._count(event.mark) if event.mark in ("exchange", "batch") else 0
            self.wait(
                lambda event=event, before=before: (
                    event.mark == "start" or self._count(event.mark) > before
                ),
                f"{event.mark!r} after {self.hits}",
            )
            until = time.monotonic() + event.delay
            self.wait(lambda until=until: time.monotonic() >= until, "")
            if self._over():
                return
            hit, undo = self._fire(event)
            if hit:
                self.hits.append(hit)
                self.fired.append(event)
            if undo:
                self.take_back_later(event.lasts, undo)

    def _count(self, mark: str) -> int:
        return sum(line.startswith(mark) for line in self._printed())

    def wait(self, condition: Callable[[], object], what: str, timeout: float = PROGRESS_S) -> None:
        """Wait for a condition or the end, and take faults back meanwhile."""
        deadline = time.monotonic() + timeout
        while not (self._over() or condition()):
            self.take_back()
            if time.monotonic() > deadline:
                raise Violation(f"after {timeout:g} s still waiting for {what}")
            time.sleep(0.02)

    def take_back(self, *, all_of_them: bool = False) -> None:
        """Take back the faults whose time has come."""
        for entry in list(self._undo):
            if all_of_them or entry[0] <= time.monotonic():
                self._undo.remove(entry)
                if entry[1]() is False:  # another fault keeps from it, or it goes on
                    self.take_back_later(1, entry[1])

    def take_back_later(self, seconds: float, undo: Undo) -> None:
        """Do something after some seconds; again a second later where it returns False."""
        self._undo.append((time.monotonic() + seconds, undo))

    def finish(self) -> None:
        """Wait for the end, and take all back."""
        try:
            self.wait(self._over, f"the end after {self.hits}", END_S)
        finally:
            self.take_back(all_of_them=True)


def strike(process: psutil.Process, name: str) -> Undo | None:
    """Send a signal by its name; what a STOP is taken back by."""

    def go_on() -> None:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)

    with contextlib.suppress(psutil.Error):
        process.send_signal(getattr(signal, f"SIG{name}"))
    return go_on if name == "STOP" else None
