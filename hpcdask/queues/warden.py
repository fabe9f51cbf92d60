"""``python -m hpcdask.queues.warden FOLDER``: cancels a cluster's jobs when its notebook is gone.

The notebook holds the other end of a pipe. When that closes, or the notebook's process is gone
while something it forked still has the pipe, the warden cancels all jobs of the cluster, sees that
they are gone, and removes the keys. A cluster that closes by itself dismisses it first.

Where a site ends all processes of a user who logs out, it ends the warden too; workers then end
by themselves after their death timeout, and ``hpcdask cleanup`` cancels what is pending.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from hpcdask.errors import HpcdaskError, QueueError
from hpcdask.queues.base import COMMAND_TIMEOUT_S, Queue
from hpcdask.queues.folder import ClusterFolder
from hpcdask.queues.registry import queue_class
from hpcdask.reconcile import OVER

#: Seconds that a warden gets to start: imports from a shared file system can be slow.
START_S = 60.0
#: Seconds that a dismissed warden gets to end.
DISMISS_S = 10.0
#: Seconds that cancelling and verifying may take. More than an unanswered submission counts.
END_S = 150.0
#: Seconds for which a submission that was cut off may still bring jobs.
UNANSWERED_S = COMMAND_TIMEOUT_S + 15
#: Least and most seconds between two looks at the queue.
PAUSE_S = (0.5, 10.0)
#: Found wherever the notebook found it, even when that is not on the path of a new Python.
PROGRAM = """\
import sys
sys.path.append(sys.argv.pop(1))
from hpcdask.queues import warden
warden.main()
"""


class Warden:
    """Handle on a cluster's warden."""

    def __init__(self, process: subprocess.Popen[bytes], folder: ClusterFolder) -> None:
        self.pid = process.pid
        self._process = process
        self._folder = folder
        self._holder = os.getpid()

    def dismiss(self) -> None:
        """The cluster has closed and its jobs are gone: note it, and have the warden do nothing."""
        if os.getpid() != self._holder:
            return  # a fork of the notebook
        self._folder.mark_ended()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b".")
            self._process.stdin.flush()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(DISMISS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_warden(folder: ClusterFolder) -> Warden:
    """Start the warden of a cluster, and wait until it watches.

    Raises
    ------
    QueueError
        It does not start.
    """
    package = Path(__file__).parents[2]
    path = folder.path / "warden.log"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, str(package), str(folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        raise QueueError(f"the cluster's warden cannot be started: {error}") from None
    finally:
        os.close(log)
    assert process.stdout is not None
    with process.stdout as ready:
        if not select.select([ready], [], [], START_S)[0] or not ready.read(1):
            process.kill()
            process.communicate()
            raise QueueError(
                f"the cluster's warden, which would cancel its jobs after the death of this "
                f"process, has not started within {START_S:g} s or has failed. See {path}"
            )
    return Warden(process, folder)


async def end_jobs(
    queue: Queue,
    find: Callable[[], Awaitable[list[str]]],
    say: Callable[[str], None],
    awaited: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Cancel jobs, and see that they are gone.

    Parameters
    ----------
    queue
        Theirs.
    find
        Looks which of them are not over.
    say
        Gets one line for each thing done.
    awaited
        Whether more of them may still come.

    Returns
    -------
    list of str
        Jobs that are still there after `END_S`.

    Raises
    ------
    QueueError
        The queue did not answer until then.
    """
    deadline = time.monotonic() + END_S
    pause, told = PAUSE_S[0], set[str]()

    def say_once(text: str) -> None:
        if text not in told:
            told.add(text)
            say(text)

    while True:
        live: list[str] = []
        problem: QueueError | None = None
        try:
            live = await find()
            if live:
                say_once(f"cancelling {' '.join(live)}")
                await queue.cancel(live)
        except QueueError as error:
            problem = error
            say_once(f"{error}; trying again")
        if not live and not problem:
            if not awaited():
                return []
            say_once("waiting for the jobs of a submission that was cut off")
        if time.monotonic() > deadline:
            if problem:
                raise problem
            return live
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE_S[1])


async def end_cluster(folder: ClusterFolder, queue: Queue) -> list[str]:
    """Cancel the jobs of a cluster that nobody holds any more; return what is left."""

    async def find() -> list[str]:
        """Those with the tag, and the recorded ones, should the queue have lost tags."""
        mine = [job_id for job_id, tag in (await queue.tagged()).items() if tag == folder.tag]
        others = set(folder.ids()) - set(mine)
        seen = await queue.query(others) if others else {}
        return mine + [job_id for job_id, job in seen.items() if job.state not in OVER]

    return await end_jobs(queue, find, _say, lambda: may_bring_more(folder))


def may_bring_more(folder: ClusterFolder) -> bool:
    """Whether the end of the notebook may have cut off a submission that goes on by itself."""
    age = folder.unanswered_s()
    return age is not None and age < UNANSWERED_S


def main() -> None:
    """Watch the pipe that is stdin; then act, or not."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    notebook = os.getppid()
    os.umask(0o077)
    folder = ClusterFolder.open(sys.argv[1])
    queue = queue_class(folder.queue)()
    os.chdir("/")
    os.write(1, b".")
    os.dup2(2, 1)
    if _is_dismissed(notebook):
        return
    _say("the notebook is gone")
    folder.remove_keys()  # jobs that start only now end at once
    _say("the keys are removed")
    try:
        left = asyncio.run(end_cluster(folder, queue))
        if left:
            _say(f"still there: {' '.join(left)}. Try: hpcdask cleanup {folder.name}")
        else:
            folder.mark_ended()
            _say("no job is left")
    except HpcdaskError as error:
        _say(f"giving up: {error}. Try: hpcdask cleanup {folder.name}")


def _is_dismissed(notebook: int) -> bool:
    """Wait for the cluster's end; whether it was orderly."""
    while not select.select([0], [], [], 1.0)[0]:
        if os.getppid() != notebook:
            return False  # what it forked may hold the pipe for long
    return bool(os.read(0, 1))


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
