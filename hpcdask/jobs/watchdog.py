"""``python -m hpcdask.jobs.watchdog FOLDER``: cancels a cluster's jobs when its notebook is gone.

The notebook holds the other end of a pipe. When that closes, or the notebook's process is gone
while something it forked still has the pipe, the watchdog cancels all jobs of the cluster, sees
that they are gone, and removes the keys. A cluster that closes by itself dismisses it first.

Where a site ends all processes of a user who logs out, it ends the watchdog too; workers then end
by themselves after their death timeout, and ``hpcdask down --dead`` cancels what is pending.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from hpcdask.errors import HpcdaskError, QueueError

from .folder import ClusterFolder

#: Seconds to start, where imports from a shared file system may be slow; seconds to end.
START_S, DISMISS_S = 60.0, 10.0


def start_watchdog(folder: ClusterFolder) -> subprocess.Popen[bytes]:
    """Start the watchdog of a cluster, and wait until it watches.

    Raises QueueError if it does not start.
    """
    what = "the cluster's watchdog, which would cancel its jobs after the death of this process,"
    path = folder.path / "watchdog.log"
    with open(path, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcdask.jobs.watchdog", str(folder.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise QueueError(
                f"{what} cannot be started: {error}. See free memory and processes (ulimit -u) here"
            ) from None
    assert process.stdout is not None
    with process.stdout as ready:
        if not select.select([ready], [], [], START_S)[0] or not ready.read(1):
            process.kill()
            process.communicate()
            raise QueueError(f"{what} has failed, or takes more than {START_S:g} s. See {path}")
    return process


def dismiss(process: subprocess.Popen[bytes]) -> None:
    """End a watchdog: its cluster has closed, and its jobs are gone."""
    try:
        process.communicate(b".", DISMISS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    """Watch the pipe that is stdin; then act, or not."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    notebook = os.getppid()
    os.umask(0o077)
    folder = ClusterFolder.open(sys.argv[1])
    os.chdir("/")
    os.write(1, b".")
    os.dup2(2, 1)
    while not select.select([0], [], [], 1.0)[0]:
        if os.getppid() != notebook:
            break  # what it forked may hold the pipe for long
    else:
        if os.read(0, 1):
            return  # dismissed
    # asyncio doubles the size of a process; while it waits, the watchdog does without
    import asyncio

    from hpcdask.queues.registry import queue_class

    from .cancel import end_jobs

    _say("the notebook is gone")
    folder.remove_keys()  # jobs that start only now end at once
    try:
        queue = queue_class(folder.queue)()
        asyncio.run(end_jobs(queue, folder.name, _say, folder=folder))
        folder.mark_ended()
        _say("no job is left")
    except HpcdaskError as error:
        _say(f"giving up: {error}. Try: hpcdask down {folder.name}")


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
