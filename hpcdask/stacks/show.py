"""Report as text: one screen, however many workers there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dask.utils import format_bytes

from hpcdask.jobs.detached import HOLDERS
from hpcdask.logs import plural, some
from hpcdask.node.observe import Frame, ProcessView

from .blocks import Block, blocks, duration, is_waiting, loop_thread, main_thread, own
from .diagnose import diagnose
from .look import Report

#: Lines of a stack, blocks, and silent workers or waiting Dask tasks that are shown.
LINES, BLOCKS, MOST = 8, 12, 5
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
    if rest := found[BLOCKS:]:
        count = plural(sum(len(block.workers) for block in rest), "worker")
        yield f"\n{plural(len(rest), 'other stack')} of {count}: see --json"
    yield from _work(report)
    gpus = {one.name: _gpu(one.gpu) for one in report.workers if one.gpu.get("memory_used")}
    yield from _grouped("\nGPUs:", gpus, BLOCKS, "  {what}: {names}")
    yield from _grouped("\nNot reached:", report.unreached, MOST, "  {names}: {what}")
    yield "\nMost likely:"
    for text in diagnose(report)[:MOST]:
        yield f"  - {text}"


def _grouped(title: str, texts: Mapping[str, str], most: int, line: str) -> Iterator[str]:
    """Yield a line for each text, with the names that have it."""
    groups: dict[str, list[str]] = {}
    for name, text in texts.items():
        groups.setdefault(text, []).append(name)
    if groups:
        yield title
    for what, names in list(groups.items())[:most]:
        yield line.format(what=what, names=some(names))
    if len(groups) > most:
        yield f"  and {len(groups) - most} others"


def _part(name: str, process: ProcessView) -> Iterator[str]:
    told = f"{process.cores:.1f} cores" if process.state else "gone"
    yield f"\n{name.capitalize()} (process {process.pid}, {told}):"
    if process.problem and not process.threads:
        yield f"  no stack: {process.problem}"
    loop = loop_thread(process)
    thread = loop if name == "scheduler" else main_thread(process)
    if thread is not None and is_waiting(thread):
        yield "  waits for messages"
    elif thread is not None:
        yield from _stack(thread.frames)
    if name in HOLDERS and loop is not None and loop is not thread and not is_waiting(loop):
        yield "  its event loop, with the scheduler:"
        yield from _stack(loop.frames)


def _block(block: Block) -> Iterator[str]:
    what = [block.what]
    if block.keys:
        key, seconds = block.longest()
        count = len(block.keys)
        which = f"Dask task {key}" if count == 1 else f"{count} Dask tasks, such as {key}"
        what.append(f"{which} {duration(seconds)}".strip())
    elif block.frames and not block.what:
        what.append("a Dask task")
    count = len(block.workers)
    cores = sum(one.process.cores for one in block.workers) / count
    what.append(f"{cores:.1f} cores{' each' * (count > 1)}")
    yield f"\n{plural(count, 'worker')} ({some(block.names)}): {', '.join(filter(None, what))}"
    if not block.frames and block.workers[0].process.problem:
        yield f"  no stack: {block.workers[0].process.problem}"
    yield from _stack(block.frames)


def _stack(frames: list[Frame]) -> Iterator[str]:
    """Yield the innermost lines, and in any case the innermost one of the user."""
    mine = frames.index(own(frames)[0]) if frames else 0
    for frame in [*frames[:LINES], *frames[max(LINES, mine) : mine + 1]]:
        if frame is frames[mine] and mine > LINES:
            yield f"  … {plural(mine - LINES, 'line')} of Python and Dask"
        yield f"  {frame}{'  ' + frame.text if frame.text else ''}"
    if (outer := len(frames) - max(LINES, mine + 1)) > 0:
        yield f"  and {plural(outer, 'outer line')}"


def _work(report: Report) -> Iterator[str]:
    """Yield Dask tasks, those that wait, silent workers, and workers that fetch data."""
    if report.work is None:
        return
    states = ", ".join(f"{count} {state}" for state, count in report.work["states"].items())
    yield f"\nDask tasks: {states or 'none'}"
    for key, others in list(report.work["waiting"].items())[:MOST]:
        yield f"  {key} waits for {some(others, 3)}"
    known = report.known_workers
    silent = {n: one["silent_s"] for n, one in known.items() if one["silent_s"] > SILENT_S}
    for name in sorted(silent, key=silent.__getitem__, reverse=True)[:MOST]:
        yield f"  the scheduler has not heard of worker {name} {duration(silent[name])}"
    addresses = {one["address"]: name for name, one in known.items()}
    fetching = {one.name: (one.work or {}).get("fetches_from", ()) for one in report.workers}
    for name, sources in [item for item in fetching.items() if item[1]][:MOST]:
        yield f"  {name} fetches data from {some(addresses.get(at, at) for at in sources)}"


def _gpu(gpu: Mapping[str, float | None]) -> str:
    busy = gpu["utilisation"]
    used, total = (format_bytes(int(gpu[name] or 0)) for name in ("memory_used", "memory_total"))
    return f"{'use not told' if busy is None else f'{busy:.0f} % busy'}, {used} of {total}"
