"""``make chaos``: plays episodes drawn from a seed until the time is over.

The environment says which: SEED (of the first one), MINUTES or EPISODES (how long), ARENA
(``runner``, ``jobs`` or ``gpu``).
"""

from __future__ import annotations

import collections
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos.clusters import JobsArena
from chaos.episodes import Episode, draw
from chaos.playing import Violation
from chaos.runs import RunnerArena


def violation_of(arena: Any, episode: Episode) -> str:
    """Play an episode; return what was violated, or nothing."""
    start = time.monotonic()
    try:
        came = arena.play(episode)
        violated = ""
    except Violation as error:
        came, violated = "VIOLATED", str(error)
    except Exception as error:  # of the arena itself: that is no finding, but is to be seen
        came, violated = "BROKEN", f"{type(error).__name__}: {error}"
    print(f"{episode} {time.monotonic() - start:.1f} s: {came}\n{violated}".rstrip(), flush=True)
    return violated


def chaos(name: str, seed: int, episodes: int = 0, minutes: float = 0) -> int:
    """Play so many episodes, or for so long; return how many failed."""
    until = time.monotonic() + 60 * minutes
    kinds: collections.Counter[str] = collections.Counter()
    played = failed = 0
    with tempfile.TemporaryDirectory(prefix="hpcdask-chaos-") as folder:
        device = "cuda" if name == "gpu" else "cpu"
        arena = JobsArena() if name == "jobs" else RunnerArena(Path(folder), device)
        try:
            while played < episodes or time.monotonic() < until:
                episode = draw(name, seed + played)
                played += 1
                if why := arena.left_out(episode):
                    print(f"{episode} left out: {why}", flush=True)
                    continue
                kinds.update(event.fault for event in episode.events)
                failed += bool(violation_of(arena, episode))
        finally:
            arena.close()
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    print(f"{name}: {played} episodes, {failed} failed; events: {counts}", flush=True)
    return failed


def main() -> int:
    """Read the environment and play."""
    env = {name: value for name, value in os.environ.items() if value}
    seed = int(env.get("SEED", time.time_ns() % 10**6))
    episodes = int(env.get("EPISODES", 0))
    minutes = 0 if episodes else float(env.get("MINUTES", 1))
    print(f"SEED={seed}", flush=True)
    return bool(chaos(env.get("ARENA", "runner"), seed, episodes, minutes))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end what was started
    sys.exit(main())
