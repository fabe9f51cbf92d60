"""Diagnosis: pure functions of a report, the surest first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dask.utils import format_time

from hpcdask.jobs.detached import HOLDERS
from hpcdask.logs import natural, numbered, plural, some
from hpcdask.node.observe import STOPPED

from .blocks import BUSY, Block, blocks, is_waiting, loop_thread, main_thread, place
from .look import SCHEDULER, WORKER, Report

#: Seconds after which a worker that the scheduler has not heard of is silent.
SILENT_S = 30.0
#: Files with functions that wait for a lock of Dask, seen in distributed 2026.7.
DASK_LOCKS = ("distributed/lock.py", "distributed/semaphore.py")
#: Advice on locks and gangs.
HELD = "Who holds it does not end, or waits for another one: take locks in one order"
ROUND = "All that run wait, so each most likely holds what another wants: take locks in one order"
EACH = "Every rank has to come to each barrier"


def diagnose(report: Report) -> list[str]:
    """Return sentences, the most likely first; one at least."""
    seen = blocks(report)
    found = [text for rule in RULES for text in rule(report, seen)]
    return list(dict.fromkeys(found)) or [_nothing(report, seen)]


def _stopped(report: Report, seen: list[Block]) -> Iterator[str]:
    workers = {f"Worker {one.name} on {one.host}": one.process for one in report.workers}
    parts = {f"The {name}": process for name, process in report.parts.items()}
    for who, process in (workers | parts).items():
        if process.state and process.state in STOPPED:
            yield (
                f"{who} is stopped, by SIGSTOP, a debugger or a suspended job. What needs it "
                f"waits. Continue it: kill -CONT {process.pid}"
            )


def _gone(report: Report, seen: list[Block]) -> Iterator[str]:
    if gone := [worker.name for worker in report.workers if worker.state == "gone"]:
        end = "See its end in the log; the nanny starts another, or has given up"
        yield f"{_workers(gone)} lost: there is no process. {end}"
    for name, process in report.parts.items():
        if not process.state:
            yield f"The {name} is gone: there is no process {process.pid}"
    for name, known in report.known_workers.items():
        if f"{WORKER}{name}" in report.unreached and known["silent_s"] > SILENT_S:
            yield (
                f"Worker {name} is lost: for {format_time(known['silent_s'])}, neither its node "
                f"{known['host']} nor the worker has answered. See the node with the queue's "
                f"commands"
            )


def _silent(report: Report, seen: list[Block]) -> Iterator[str]:
    for block in seen:
        silent = {name: one for name, one in block.workers.items() if one.state == "silent"}
        held = [name for name, one in silent.items() if block.frames and one.process.busy >= BUSY]
        where = f" at {place(block.frames)}" if block.frames else ""
        if held:
            key = f" (Dask task {block.longest()})" if block.tasks else ""
            yield (
                f"{_workers(held)} in a loop of compiled code that most likely holds Python's "
                f"lock: nothing else of the process can run, and it does not answer. It is called"
                f"{where}{key}"
            )
        elif silent:
            disk = any(worker.process.state == "D" for worker in silent.values())
            why = "waits for a file system or a driver" if disk else "waits in a blocking call"
            yield f"{_workers(silent)} silent: the process {why} and does not answer{where}"


def _scheduler(report: Report, seen: list[Block]) -> Iterator[str]:
    for name, process in report.parts.items() if SCHEDULER in report.unreached else ():
        loop, main = loop_thread(process), main_thread(process)
        if loop and not is_waiting(loop):
            yield f"The scheduler's event loop does not answer: it is at {place(loop.frames)}"
        elif main and process.busy >= BUSY:
            yield f"The {name} computes and does not answer, at {place(main.frames)}"


def _gangs(report: Report, seen: list[Block]) -> Iterator[str]:
    for gang in report.work.get("gangs", ()):
        size, names = gang["size"], gang["workers"]
        missing = [rank for rank in range(size) if rank not in gang["arrived"]]
        if not names:
            yield f"A gang of {size} waits for workers: fewer are free, and it starts when all are"
        elif missing and not gang["started"]:
            ranks = some(f"rank {rank} (worker {names[rank]})" for rank in missing)
            yield f"A gang of {size} waits at its start for {ranks}"
        elif gang["calling"]:  # else a rank failed meanwhile, and the gang is being ended
            yield from _calling(gang, seen)


def _calling(gang: Mapping[str, Any], seen: list[Block]) -> Iterator[str]:
    """Yield the fault of a gang whose function was called on all ranks."""
    size, names, places = gang["size"], gang["workers"], dict[str, list[int]]()
    for block in seen:
        if block.in_gang:
            ranks = [names.index(name) for name in block.workers if name in names]
            places.setdefault(f"at {place(block.frames)}", []).extend(ranks)
    places["returned"] = [rank for rank in range(size) if rank not in gang["calling"]]
    there = sorted(filter(lambda one: one[1], places.items()), key=lambda one: -len(one[1]))
    texts = [f"{numbered('rank', ranks)} {where}" for where, ranks in there]
    if len(texts) > 1:
        yield f"A gang of {size} is in a dead-lock: {'; '.join(texts)}. {EACH}"
    elif texts:
        yield f"A gang waits, and all are at the same line: {texts[0]}. A message is missing"


def _full(report: Report, seen: list[Block]) -> Iterator[str]:
    if paused := [worker.name for worker in report.workers if worker.state == "paused"]:
        yield (
            f"{_workers(sorted(paused, key=natural))} full and paused: host memory is above the "
            f"limit, so they start nothing new. Give them more (--memory-limit), fewer threads, or "
            f"smaller chunks; results stay while a future refers to them"
        )
    for block in seen:
        for name, worker in block.workers.items() if block.frames else ():
            used, total = worker.gpu.get("memory_used"), worker.gpu.get("memory_total")
            if used and total and used > 0.98 * total and not worker.gpu["utilisation"]:
                yield f"The GPU of worker {name} is full and idle: see GPU memory in its log"


def _locks(report: Report, seen: list[Block]) -> Iterator[str]:
    locks = report.work.get("locks", {})
    running = [block for block in seen if block.frames]
    waiting = [block for block in running if _waits_for_dask(block)]
    if waiting or locks:
        count = sum(block.count for block in waiting)
        names = (
            f"{name!r} ({one['waiting']} {_wait(one['waiting'])})" for name, one in locks.items()
        )
        which = f": {some(names)}" if locks else ""
        where = f" at {some((place(block.frames) for block in waiting), 3)}" if waiting else ""
        held = sum(bool(one["held"]) for one in locks.values())
        advice = ROUND if held > 1 and waiting == running else HELD
        tasks = plural(count, "Dask task")
        yield f"{tasks} {_wait(count)} for a lock of Dask{which}{where}. {advice}"
    for block in running:
        if _waits_for_python(block):
            yield (
                f"{plural(block.count, 'Dask task')} on {some(block.workers)} {_wait(block.count)} "
                f"for a lock of the worker's process at {place(block.frames)}. {HELD}"
            )


def _waits_for_dask(block: Block) -> bool:
    return any(frame.file.endswith(DASK_LOCKS) for frame in block.frames)


def _waits_for_python(block: Block) -> bool:
    """Return whether the innermost frame waits for a lock, and for no answer of the cluster."""
    if block.is_busy or any(one.file.endswith("distributed/utils.py") for one in block.frames):
        return False
    inner = block.frames[0]
    text = inner.text.replace(" ", "").lower()
    said = ".acquire(" in text or (text.startswith("with") and "lock" in text)
    return said or inner.file.endswith("threading.py")


def _unrunnable(report: Report, seen: list[Block]) -> Iterator[str]:
    if report.problem:
        yield report.problem[0].upper() + report.problem[1:]
    if report.work and not report.known_workers:
        jobs = f"its jobs are {report.jobs}. See" if report.jobs else "see"
        yield f"The scheduler has no worker: {jobs} the queue (hpcdask list --jobs) and the logs"
    elif keys := report.work.get("unrunnable"):
        they = "They ask for resources or workers that are not there"
        yield f"No worker may run these Dask tasks: {some(keys)}. {they}"


RULES = (_stopped, _gone, _silent, _scheduler, _gangs, _full, _locks, _unrunnable)


def _nothing(report: Report, seen: list[Block]) -> str:
    """Return the longest Dask task, or the line of the program, where no rule finds anything."""
    if running := [block for block in seen if block.tasks]:
        block = max(running, key=lambda one: max(one.tasks.values()))
        does = "computing" if block.is_busy else "waiting"
        return (
            f"Nothing is known to be wrong: Dask tasks run. The longest is {block.longest()}, "
            f"{does} at {place(block.frames)}"
        )
    states = report.work.get("states", {})
    for name in () if "processing" in states or "waiting" in states else ("program", *HOLDERS):
        process = report.parts.get(name)
        if process and (thread := main_thread(process)):
            if name in HOLDERS and is_waiting(thread):
                return f"No Dask task runs, and nothing is wrong here: the {name} waits for work"
            does = "computing" if process.busy >= BUSY else "waiting"
            return f"No Dask task runs: the {name} itself is at {place(thread.frames)}, {does}"
    return "Nothing is known to be wrong"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _workers(names: Collection[str]) -> str:
    several = len(names) > 1
    return f"Worker{'s' * several} {some(names)} {'are' if several else 'is'}"
