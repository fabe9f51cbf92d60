"""Report as text: one screen, however many workers there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from dask.utils import format_bytes

from hpcdask.logs import plural, some
from hpcdask.node.observe import Frame, ProcessView

from .blocks import Block, blocks, is_waiting, loop_thread, main_thread, own
from .diagnose import diagnose
from .look import Report

#: Lines of a stack, blocks, and waiting Dask tasks or causes that are shown.
LINES, BLOCKS, MOST = 8, 12, 5


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
    if report.work:
        states = (f"{count} {state}" for state, count in report.work["states"].items())
        yield f"\nDask tasks: {', '.join(states) or 'none'}"
        for key, others in islice(report.work["waiting"].items(), MOST):
            yield f"  {key} waits for {some(others, 3)}"
    gpus = {one.name: _gpu(one.gpu) for one in report.workers if one.gpu.get("memory_used")}
    yield from _grouped("\nGPUs:", gpus, BLOCKS)
    yield from _grouped("\nNot reached:", report.unreached, MOST)
    yield "\nMost likely:"
    yield from (f"  - {text}" for text in diagnose(report)[:MOST])


def _grouped(title: str, texts: Mapping[str, str], most: int) -> Iterator[str]:
    """Yield a line for each text, with the names that have it."""
    groups: dict[str, list[str]] = {}
    for name, text in texts.items():
        groups.setdefault(text, []).append(name)
    if groups:
        yield title
    yield from islice((f"  {some(names)}: {text}" for text, names in groups.items()), most)
    if len(groups) > most:
        yield f"  and {len(groups) - most} others"


def _part(name: str, process: ProcessView) -> Iterator[str]:
    cores = f"{process.cores:.1f} cores" if process.state else "gone"
    yield f"\n{name.capitalize()} (process {process.pid}, {cores}):"
    shown, loop = main_thread(process), loop_thread(process)
    if name != "program" and loop and not is_waiting(loop):  # of a scheduler, in any thread
        shown = loop
    if shown is None and process.problem:
        yield f"  no stack: {process.problem}"
    elif shown and is_waiting(shown):
        yield "  waits for messages"
    elif shown:
        yield from _stack(shown.frames)


def _block(block: Block) -> Iterator[str]:
    what = [block.what] if block.what else []
    if block.tasks:
        count = len(block.tasks)
        which = "Dask task" if count == 1 else f"{count} Dask tasks, such as"
        what.append(f"{which} {block.longest()}")
    elif block.frames and not block.what:
        what.append("a Dask task")
    processes = [worker.process for worker in block.workers.values()]
    count = len(processes)
    cores = sum(process.cores for process in processes) / count
    what.append(f"{cores:.1f} cores{' each' * (count > 1)}")
    yield f"\n{plural(count, 'worker')} ({some(block.workers)}): {', '.join(what)}"
    if not block.frames and processes[0].problem:
        yield f"  no stack: {processes[0].problem}"
    yield from _stack(block.frames)


def _stack(frames: Sequence[Frame]) -> Iterator[str]:
    """Yield the innermost lines, and in any case the innermost one of the user."""
    shown = list(frames[:LINES])
    shown += [frame for frame in own(frames)[:1] if frame not in shown]
    yield from (f"  {frame}{'  ' + frame.text if frame.text else ''}" for frame in shown)
    if more := len(frames) - len(shown):
        yield f"  and {plural(more, 'more line')}"


def _gpu(gpu: Mapping[str, float | None]) -> str:
    busy = gpu["utilisation"]
    used, total = (format_bytes(int(gpu[name] or 0)) for name in ("memory_used", "memory_total"))
    return f"{'use not told' if busy is None else f'{busy:.0f} % busy'}, {used} of {total}"
