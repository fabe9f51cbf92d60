"""The thread that uses a device once before the first Dask task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from hpcdask.gpu import first_use
from hpcdask.gpu.first_use import FirstUse

DEADLINE_S = 60.0


def steps_of(*does: Callable[[], object]) -> Callable[[], Iterator[None]]:
    """Steps that do one thing each."""

    def steps() -> Iterator[None]:
        for do in does:
            do()
            yield

    return steps


def end(use: FirstUse) -> None:
    use._thread.join(DEADLINE_S)
    assert use.is_over


def test_it_ends_after_the_step_under_way(monkeypatch: pytest.MonkeyPatch):
    begun, go_on, taken = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        go_on.wait(DEADLINE_S)

    monkeypatch.setattr(first_use, "_steps", steps_of(first, lambda: taken.append(2)))
    use = FirstUse()
    use.start()
    assert begun.wait(DEADLINE_S)
    use.stop()
    go_on.set()
    end(use)
    assert not taken


def test_a_dask_task_that_came_first_leaves_nothing_to_do(monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    monkeypatch.setattr(first_use, "_steps", steps_of(lambda: taken.append(1)))
    use = FirstUse()
    use.stop()
    use.start()
    assert use._thread.ident is None
    assert not taken


def test_what_fails_is_left_to_the_dask_task_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(first_use, "_steps", steps_of(lambda: 1 // 0))
    use = FirstUse()
    use.start()
    end(use)
    assert not capfd.readouterr().err
