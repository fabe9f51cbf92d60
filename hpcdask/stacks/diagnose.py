"""Diagnosis: pure functions of what was seen, the surest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from hpcdask.jobs.detached import HOLDERS
from hpcdask.logs import natural, plural, some
from hpcdask.node.observe import STOPPED, Frame, ProcessView

from .blocks import (
    BUSY,
    Block,
    blocks,
    duration,
    is_waiting,
    loop_thread,
    main_thread,
    place,
)
from .look import Report

#: Seconds after which a worker that the scheduler has not heard of is silent.
SILENT_S = 30.0
#: Functions that wait for a lock of Dask: frames' ends, seen in distributed 2026.7.
DASK_LOCKS = ("distributed/lock.py", "distributed/semaphore.py")
#: What is to be said of who holds a lock.
HELD = "Who holds it does not end, or waits for another one: take locks in one order"
ROUND = "All that run wait, so each most likely holds what another wants: take locks in one order"
#: Functions of Python that wait for a lock which has a frame of its own.
LOCK_FUNCTIONS = ("acquire", "__enter__", "wait", "wait_for", "join", "get")


def diagnose(report: Report) -> list[str]:
    """Sentences, the most likely first; one at least."""
    seen = blocks(report)
    found = [text for rule in RULES for text in rule(report, seen)]
    return list(dict.fromkeys(found)) or list(_nothing(report, seen))


def _stopped(report: Report, seen: list[Block]) -> Iterator[str]:
    for worker in report.workers:
        if worker.process.state and worker.process.state in STOPPED:
            yield (
                f"Worker {worker.name} is lost: its process {worker.process.pid} on "
                f"{worker.host} is stopped, by SIGSTOP, a debugger or a suspended job. "
                f"What needs it waits. "
                f"Continue it: kill -CONT {worker.process.pid}"
            )
    for name, process in report.parts.items():
        if process.state and process.state in STOPPED:
            yield f"The {name} (process {process.pid}) is stopped. kill -CONT {process.pid}"


def _gone(report: Report, seen: list[Block]) -> Iterator[str]:
    if gone := [worker.name for worker in report.workers if not worker.process.state]:
        yield (
            f"{_workers(gone)} lost: there is no process. See its end in the log; the nanny "
            f"starts another, or has given up"
        )
    for name, process in report.parts.items():
        if not process.state:
            yield f"The {name} is gone: there is no process {process.pid}"
    known = (report.work or {}).get("workers", {})
    for name in (one.removeprefix("worker ") for one in report.unreached):
        if known.get(name, {}).get("silent_s", 0) > SILENT_S:
            silent = duration(known[name]["silent_s"])
            yield (
                f"Worker {name} is lost: neither its node {known[name]['host']} nor the worker "
                f"has answered {silent}. See the node with the queue's commands"
            )


def _gil(report: Report, seen: list[Block]) -> Iterator[str]:
    for block in seen:
        held = [
            worker
            for worker in block.workers
            if worker.work is None and worker.process.busy >= BUSY
        ]
        if held and block.frames:
            key = f" (Dask task {block.longest()[0]})" if block.keys else ""
            sure = "holds" if block.owns_gil else "most likely holds"
            yield (
                f"{_workers([one.name for one in held])} in a loop of compiled code that {sure} "
                f"Python's lock (the GIL): nothing else of the process can run, and it does not "
                f"answer. It is called at {place(block.frames)}{key}"
            )
    for name, process in report.parts.items():
        thread = main_thread(process)
        if "scheduler" in report.unreached and process.busy >= BUSY and thread is not None:
            held_by = next((one for one in process.threads if one.owns_gil), thread)
            yield f"The {name} computes and does not answer, at {place(held_by.frames)}"


def _gangs(report: Report, seen: list[Block]) -> Iterator[str]:
    for gang in (report.work or {}).get("gangs", []):
        size, names = gang["size"], list(gang["workers"])
        if not names:
            yield f"A gang of {size} waits for workers: fewer are free, and it starts when all are"
            continue
        if not gang["started"]:
            if missing := [rank for rank in range(size) if rank not in gang["arrived"]]:
                who = some(f"{rank} (worker {names[rank]})" for rank in missing)
                yield f"A gang of {size} waits at its start for {_ranks(missing)} {who}"
            continue  # else a rank failed meanwhile, and the gang is being ended
        yield from _started(size, names, list(gang["calling"]), seen)
    told = (report.work or {}).get("gangs")
    if told is None and (ranks := [block for block in seen if block.in_gang]):
        yield from _apart({place(one.frames): one.names for one in ranks}, "worker")


def _started(size: int, names: list[str], calling: list[int], seen: list[Block]) -> Iterator[str]:
    """A gang whose function was called on all ranks."""
    places: dict[str, list[str]] = {}
    for block in seen:
        mine = [str(names.index(name)) for name in block.names if name in names]
        if block.in_gang and mine:
            places.setdefault(place(block.frames), []).extend(mine)
    returned = [rank for rank in range(size) if rank not in calling]
    if returned and calling:
        where = max(places, key=lambda one: len(places[one]), default="?")
        yield (
            f"A gang of {size} is in a dead-lock: {_ranks(returned)} {some(map(str, returned))} "
            f"returned, and {_ranks(calling)} {some(map(str, calling))} still "
            f"wait{'s' * (len(calling) == 1)} at {where}. Every rank has to come to each barrier"
        )
        return
    yield from _apart(places, "rank")


def _apart(places: dict[str, list[str]], noun: str) -> Iterator[str]:
    """The calls of a gang that stand where most do not."""
    if not places:
        return
    most = max(places, key=lambda one: len(places[one]))
    count = sum(map(len, places.values()))
    if len(places) == 1:
        yield f"All {count} calls of a gang are at the same line, {most}: a message is missing"
        return
    others = "; ".join(
        f"{noun}{'s' * (len(names) > 1)} {some(names)} at {where}"
        for where, names in places.items()
        if where != most
    )
    waiting = len(places[most])
    yield (
        f"A gang is in a dead-lock: {plural(waiting, noun)} wait{'s' * (waiting == 1)} "
        f"at {most}, and others are elsewhere: {others}. Every rank has to come to each barrier"
    )


def _paused(report: Report, seen: list[Block]) -> Iterator[str]:
    known = (report.work or {}).get("workers", {})
    paused = {
        worker.name for worker in report.workers if (worker.work or {}).get("status") == "paused"
    } | {name for name, one in known.items() if one["status"] == "paused"}
    if paused:
        yield (
            f"{_workers(sorted(paused, key=natural))} full and paused: host memory is above the "
            f"limit, so they start nothing new. Give them more (--memory-limit), fewer threads, or "
            f"smaller chunks; results stay while a future refers to them"
        )
    for worker in report.workers:
        used, total = worker.gpu.get("memory_used"), worker.gpu.get("memory_total")
        busy = any(worker in block.workers for block in seen if block.frames)
        if busy and used and total and used > 0.98 * total and not worker.gpu["utilisation"]:
            yield f"The GPU of worker {worker.name} is full and idle: see GPU memory in its log"


def _locks(report: Report, seen: list[Block]) -> Iterator[str]:
    locks = (report.work or {}).get("locks", {})
    waiting = [block for block in seen if block.frames and _lock_of(block) == "dask"]
    if waiting or locks:
        count = sum(len(block.keys) or len(block.workers) for block in waiting)
        which = some(
            f"{name!r} ({one['waiting']} wait{'s' * (one['waiting'] == 1)})"
            for name, one in locks.items()
        )
        where = f" at {some((place(block.frames) for block in waiting), 3)}" if waiting else ""
        yield (
            f"{plural(count, 'Dask task')} wait{'s' * (count == 1)} for a "
            f"lock of Dask{': ' * bool(which)}{which}"
            f"{where}. {ROUND if _is_round(report, seen, waiting) else HELD}"
        )
    for block in seen:
        if block.frames and _lock_of(block) == "python":
            if any(one.process.busy >= BUSY for one in block.workers):
                continue
            count = len(block.keys) or len(block.workers)
            yield (
                f"{plural(count, 'Dask task')} on {some(block.names)} wait{'s' * (count == 1)} for "
                f"a lock of the worker's process at {place(block.frames)}. {HELD}"
            )


def _is_round(report: Report, seen: list[Block], waiting: list[Block]) -> bool:
    """Return whether all Dask tasks wait for locks of which several are held."""
    held = [one for one in (report.work or {}).get("locks", {}).values() if one["held"]]
    lost = any(name.startswith("worker ") for name in report.unreached)
    return len(held) > 1 and not lost and waiting == [block for block in seen if block.frames]


def _lock_of(block: Block) -> str:
    """Return the kind of lock that the innermost frames wait for: Dask's, Python's, or none."""
    files = [frame.file for frame in block.frames[:12]]
    if any(file.endswith(DASK_LOCKS) for file in files):
        return "dask"
    if any(file.endswith("distributed/utils.py") for file in files):
        return ""  # it waits for an answer of the cluster
    inner = block.frames[0]
    named = inner.file.endswith("threading.py") and inner.function.split(".")[-1] in LOCK_FUNCTIONS
    text = inner.text.replace(" ", "").lower()
    said = ".acquire(" in text or (text.startswith("with") and "lock" in text)
    return "python" if block.in_lock or named or said else ""


def _silent(report: Report, seen: list[Block]) -> Iterator[str]:
    for block in seen:
        idle = [
            one.name
            for one in block.workers
            if one.work is None
            and one.process.state
            and one.process.state not in STOPPED
            and one.process.busy < BUSY
        ]
        if idle:
            where = f", at {place(block.frames)}" if block.frames else ""
            disk = any(one.process.state == "D" for one in block.workers)
            why = "waits for a file system or a driver" if disk else "waits in a blocking call"
            yield f"{_workers(idle)} silent: the process {why} and does not answer{where}"
    if "scheduler" in report.unreached:
        for process in report.parts.values():
            thread = loop_thread(process)
            if thread is not None and not is_waiting(thread):
                yield f"The scheduler's event loop does not answer: it is at {place(thread.frames)}"


def _unrunnable(report: Report, seen: list[Block]) -> Iterator[str]:
    work = report.work or {}
    if work and not work["workers"]:
        jobs = f"its jobs are {report.jobs}. See" if report.jobs else "see"
        yield f"The scheduler has no worker: {jobs} the queue (hpcdask jobs) and the logs"
    elif keys := work.get("unrunnable"):
        yield (
            f"No worker may run these Dask tasks: {some(keys)}. They ask for resources or workers "
            f"that are not there"
        )


RULES: list[Callable[[Report, list[Block]], Iterator[str]]] = [
    _stopped,
    _gone,
    _gil,
    _gangs,
    _paused,
    _locks,
    _silent,
    _unrunnable,
]


def _nothing(report: Report, seen: list[Block]) -> Iterator[str]:
    """Where no rule finds anything: what takes longest, or the program."""
    running = [block for block in seen if block.keys]
    if running:
        block = max(running, key=lambda one: one.longest()[1] or 0.0)
        key, seconds = block.longest()
        busy = any(one.process.busy >= BUSY for one in block.workers)
        yield (
            f"Nothing is known to be wrong: Dask tasks run. The longest is {key}, "
            f"{duration(seconds)}, {'computing' if busy else 'waiting'} at {place(block.frames)}"
        )
        return
    for name in ("program", *HOLDERS):
        process = report.parts.get(name)
        if process and (thread := main_thread(process)) and not _in_flight(report):
            if name in HOLDERS and is_waiting(thread):
                yield f"No Dask task runs, and nothing is wrong here: the {name} waits for work"
                return
            yield f"No Dask task runs: the {name} itself is at {_at(process, thread.frames)}"
            return
    yield "Nothing is known to be wrong"


def _in_flight(report: Report) -> bool:
    states: Counter[str] = Counter((report.work or {}).get("states", {}))
    return bool(states["processing"] or states["waiting"])


def _at(process: ProcessView, frames: list[Frame]) -> str:
    return f"{place(frames)}, {'computing' if process.busy >= BUSY else 'waiting'}"


def _workers(names: list[str]) -> str:
    several = len(names) > 1
    return f"Worker{'s' * several} {some(names)} {'are' if several else 'is'}"


def _ranks(ranks: list[int]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"
