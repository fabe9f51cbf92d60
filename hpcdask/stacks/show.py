"""The report as text: one screen, however many workers there are."""

from __future__ import annotations

from collections.abc import Iterator

from dask.utils import format_bytes

from hpcdask.jobs.detached import HOLDERS
from hpcdask.logs import plural, some
from hpcdask.node.observe import Frame, ProcessView

from .blocks import LINES, Block, blocks, duration, is_waiting, loop_thread, main_thread, own
from .diagnose import diagnose
from .look import Report

#: Blocks, workers that are silent, and Dask tasks that wait, that are shown.
BLOCKS, MOST = 12, 5
#: Seconds after which a connection is silent: twice the workers' usual heartbeat, and more.
SILENT_S = 10.0


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of `hpcdask stacks`."""
    jobs = f"; jobs: {report.jobs}" if report.jobs else ""
    yield f"{report.name}: {plural(len(report.workers), 'worker')} reached{jobs}"
    for name, process in report.parts.items():
        yield from _part(name, process)
    found = blocks(report)
    for block in found[:BLOCKS]:
        yield from _block(block)
    if len(found) > BLOCKS:
        rest = sum(len(block.workers) for block in found[BLOCKS:])
        more = plural(len(found) - BLOCKS, "other stack")
        yield f"\n{more} of {plural(rest, 'worker')}: see --json"
    yield from _work(report)
    yield from _gpus(report)
    if report.unreached:
        yield "\nNot reached:"
        texts: dict[str, list[str]] = {}
        for name, why in report.unreached.items():
            texts.setdefault(why, []).append(name)
        shown = list(texts.items())
        for why, names in shown[:MOST]:
            yield f"  {some(names)}: {why}"
        if len(shown) > MOST:
            yield f"  and {len(shown) - MOST} others"
    yield "\nMost likely:"
    for text in diagnose(report)[:MOST]:
        yield f"  - {text}"


def _part(name: str, process: ProcessView) -> Iterator[str]:
    told = f"{process.cores:.1f} cores" if process.state else "gone"
    yield f"\n{name.capitalize()} (process {process.pid}, {told}):"
    if process.problem and not process.threads:
        yield f"  no stack: {process.problem}"
    thread = loop_thread(process) if name == "scheduler" else main_thread(process)
    if thread is not None and is_waiting(thread):
        yield "  waits for messages"
    elif thread is not None:
        yield from _stack(thread.frames)
    loop = loop_thread(process) if name in HOLDERS else None
    if loop is not None and loop is not thread and not is_waiting(loop):
        yield "  its event loop, with the scheduler:"
        yield from _stack(loop.frames)


def _block(block: Block) -> Iterator[str]:
    head = f"{plural(len(block.workers), 'worker')} ({some(block.names)})"
    what = [block.what] if block.what else []
    if block.keys:
        key, seconds = block.longest()
        count = len(block.keys)
        which = f"Dask task {key}" if count == 1 else f"{count} Dask tasks, such as {key}"
        what.append(" ".join(filter(None, [which, duration(seconds)])))
    elif block.frames:
        what.append("a Dask task" if not block.what else "")
    cores = sum(one.process.cores for one in block.workers) / len(block.workers)
    what.append(f"{cores:.1f} cores each" if len(block.workers) > 1 else f"{cores:.1f} cores")
    yield f"\n{head}: {', '.join(filter(None, what))}"
    if not block.frames and block.workers[0].process.problem:
        yield f"  no stack: {block.workers[0].process.problem}"
    yield from _stack(block.frames)


def _stack(frames: list[Frame]) -> Iterator[str]:
    """Its innermost lines, and in any case the innermost one of the user."""
    mine = frames.index(own(frames)[0]) if frames else 0
    for frame in [*frames[:LINES], *frames[max(LINES, mine) : mine + 1]]:
        if frame is frames[mine] and mine > LINES:
            yield f"  … {plural(mine - LINES, 'line')} of Python and Dask"
        yield f"  {frame}{'  ' + frame.text if frame.text else ''}"
    if (outer := len(frames) - max(LINES, mine + 1)) > 0:
        yield f"  and {plural(outer, 'outer line')}"


def _work(report: Report) -> Iterator[str]:
    """Dask tasks, what waits for what, and who is silent."""
    if report.work is None:
        return
    states = ", ".join(f"{count} {state}" for state, count in report.work["states"].items())
    yield f"\nDask tasks: {states or 'none'}"
    for key, others in list(report.work["waiting"].items())[:MOST]:
        yield f"  {key} waits for {some(others, 3)}"
    silent = {
        name: one["silent_s"]
        for name, one in report.work["workers"].items()
        if one["silent_s"] > SILENT_S
    }
    for name in sorted(silent, key=silent.__getitem__, reverse=True)[:MOST]:
        yield f"  the scheduler has not heard of worker {name} {duration(silent[name])}"
    addresses = {one["address"]: name for name, one in report.work["workers"].items()}
    fetching = {one.name: (one.work or {}).get("fetches_from", ()) for one in report.workers}
    for name, sources in [item for item in fetching.items() if item[1]][:MOST]:
        yield f"  {name} fetches data from {some(addresses.get(at, at) for at in sources)}"


def _gpus(report: Report) -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for worker in report.workers:
        gpu = worker.gpu
        if gpu and gpu["memory_used"] is not None:
            busy = (
                "use not told" if gpu["utilisation"] is None else f"{gpu['utilisation']:.0f} % busy"
            )
            used, total = format_bytes(gpu["memory_used"]), format_bytes(gpu["memory_total"])
            rows.setdefault(f"{busy}, {used} of {total}", []).append(worker.name)
    if rows:
        yield "\nGPUs:"
    for what, names in list(rows.items())[:BLOCKS]:
        yield f"  {what}: {some(names)}"
