"""``make chaos``: plays episodes drawn from a seed until the time is over.

The environment says which: SEED (of the first one), MINUTES or EPISODES (how long), ARENA
(``runner``, ``jobs`` or ``gpu``), EPISODE (a file of one to play again), OUT (where failures go),
BESIDE (so many arenas at once, which share the GPUs).
"""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from chaos.episodes import Episode, draw, shrink
from chaos.playing import Violation
from gpu_launching import device_memory_is_back, used_memory


def open_arena(name: str, folder: Path, share: int = 1):
    """Return the arena of that name, one of so many that share the GPUs."""
    if name == "jobs":
        from chaos.clusters import JobsArena

        return JobsArena(folder)
    from chaos.runs import RunnerArena

    return RunnerArena(folder, "cuda" if name == "gpu" else "cpu", share)


def violation_of(arena, episode: Episode) -> str:
    """Play an episode; return what was violated, or nothing."""
    start = time.monotonic()
    try:
        came = arena.play(episode)
        violated = ""
    except Violation as error:
        came, violated = "VIOLATED", str(error)
    except Exception as error:  # of the arena itself: that is no finding, but is to be seen
        came, violated = "BROKEN", f"{type(error).__name__}: {error}"
    print(f"{episode} {time.monotonic() - start:.1f} s: {came}", flush=True)
    return violated


def chaos(
    name: str, seed: int, out: Path, episodes: int = 0, minutes: float = 0, share: int = 1
) -> int:
    """Play so many episodes, or for so long; return how many failed."""
    until = time.monotonic() + 60 * minutes
    kinds: collections.Counter[str] = collections.Counter()
    played = failed = 0
    with tempfile.TemporaryDirectory(prefix="hpcdask-chaos-") as folder:
        arena = open_arena(name, Path(folder), share)
        try:
            while played < episodes or time.monotonic() < until:
                episode = draw(name, seed + played)
                played += 1
                if why := arena.left_out(episode):
                    print(f"{episode} left out: {why}", flush=True)
                    continue
                kinds.update(event.fault for event in episode.events)
                if violated := violation_of(arena, episode):
                    failed += 1
                    keep(arena, episode, violated, out)
        finally:
            arena.close()
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    print(f"{name}: {played} episodes, {failed} failed; events: {counts}", flush=True)
    return failed


def side_by_side(count: int, seed: int, gpus: bool) -> bool:
    """Play in so many processes at once; say whether one failed, or device memory is left."""
    before = used_memory() if gpus else []
    here = {**os.environ, "BESIDE": "", "SHARE": str(count)}
    playing = [
        subprocess.Popen(
            [sys.executable, "-m", "chaos"],
            env=here | {"SEED": str(seed + 1000 * number)},
        )
        for number in range(count)
    ]
    failed = [one for one in playing if one.wait()]
    if left := gpus and not device_memory_is_back(before):
        print(f"device memory: {used_memory()} MiB in use, {before} before", flush=True)
    return bool(failed or left)


def keep(arena, episode: Episode, violated: str, out: Path) -> None:
    """Print and keep a failure, and the least of its events that fail again."""
    folder = out / f"{episode.arena}-{episode.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").write_text(violated)
    episode.save(folder / "episode.json")
    print("\n".join(violated.splitlines()[:4]), flush=True)
    least = shrink(episode, lambda fewer: bool(violation_of(arena, fewer)))
    least.save(folder / "shrunk.json")
    print(f"least: {least}; again: make chaos EPISODE={folder}/shrunk.json", flush=True)


def main() -> int:
    """Read the environment and play."""
    env = {name: value for name, value in os.environ.items() if value}
    out = Path(env.get("OUT", "chaos-failures"))
    if "EPISODE" in env:
        episode = Episode.load(Path(env["EPISODE"]))
        with tempfile.TemporaryDirectory(prefix="hpcdask-chaos-") as folder:
            arena = open_arena(episode.arena, Path(folder))
            try:
                violated = violation_of(arena, replace(episode))
            finally:
                arena.close()
        print(violated)
        return bool(violated)
    seed = int(env.get("SEED", time.time_ns() % 10**6))
    episodes = int(env.get("EPISODES", 0))
    minutes = 0 if episodes else float(env.get("MINUTES", 1))
    print(f"SEED={seed}", flush=True)
    name = env.get("ARENA", "runner")
    if beside := int(env.get("BESIDE", 0)):
        return side_by_side(beside, seed, name == "gpu")
    share = int(env.get("SHARE", 1))
    return bool(chaos(name, seed, out, episodes, minutes, share))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to end what was started
    sys.exit(main())
