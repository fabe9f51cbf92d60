"""Device memory: what is free, who has the rest, and whether a worker's pool finds room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcdask.gpu import memory_plan
from hpcdask.logs import some, spans
from hpcdask.spec.specs import WorkerSpec

from .findings import Facts, Finding, Reporter, amount, known_gpus, which
from .software import family

say = Reporter("GPUs")

#: Free device memory, as a fraction, below which somebody else is using the GPU.
LEAST_FREE = 0.9


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings on the memory of one node's GPUs."""
    gpus = facts["gpus"]["gpus"]
    yield from _free(gpus)
    if "software" in facts:
        yield from _allocator(facts, gpus)
    yield from _leftovers(gpus)


def _free(gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    least = min(gpus, key=lambda gpu: float(gpu["free"]) / gpu["memory"])
    if full := [gpu for gpu in gpus if gpu["free"] < LEAST_FREE * gpu["memory"]]:
        yield say.warning(
            "free memory",
            f"{which(gpus, full)}{amount(least['free'])} of {amount(least['memory'])}",
            "Others use the GPU: end what is left over (nvidia-smi lists it), or request the GPU "
            "for yourself",
        )
    else:
        part = least["free"] / least["memory"]
        yield say.ok("free memory", f"at least {part:.0%} of each GPU")


def _allocator(facts: Facts, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield findings on who allocates device memory of a worker that has a GPU to itself."""
    topic = "allocator"
    packages = facts["software"]["packages"]
    installed = {name for name in ("cupy", "rmm") if family(packages, name)}

    pools = {
        gpu.uuid: memory_plan.plan(WorkerSpec(), gpu, protocol="tcp", installed=installed).pool_size
        or 0
        for gpu in known_gpus(facts)
    }
    if "rmm" not in installed:
        yield say.ok(topic, "each library's own, without rmm")
    elif full := [gpu for gpu in gpus if pools[gpu["uuid"]] > gpu["free"]]:
        least = min(full, key=lambda gpu: int(gpu["free"]))
        yield say.warning(
            topic,
            f"{which(gpus, full)}no room for an RMM pool of {amount(pools[least['uuid']])} in "
            f"{amount(least['free'])}",
            "Workers would not start: end what uses the GPU, or give them a smaller "
            "--rmm-pool-size",
        )
    else:
        users = " for CuPy" if "cupy" in installed else ""
        sizes = ", ".join(dict.fromkeys(map(amount, pools.values())))
        yield say.ok(topic, f"an RMM pool of {sizes} on each GPU{users}, which grows as needed")


def _leftovers(gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    seen: dict[int, dict[str, Any]] = {}
    for gpu in gpus:
        for process in gpu.get("processes", []):
            entry = seen.setdefault(process["pid"], {**process, "memory": 0, "on": []})
            entry["memory"] += process["memory"] or 0
            entry["on"].append(gpu["index"])
    if not seen:
        yield say.ok("other processes", "none on these GPUs")
        return
    texts = [
        f"{p['pid']} ({p['name'] or 'cannot be seen from here'}"
        + (f" of {p['user']}" if p["user"] else "")
        + (f", {amount(p['memory'])}" if p["memory"] else "")
        + f", on GPU {spans(p['on'])})"
        for p in seen.values()
    ]
    yield say.warning(
        "other processes",
        some(texts, 8, "; "),
        "They share the GPUs' memory and time: if yours are left from an earlier run, end them "
        "with kill PID",
    )
