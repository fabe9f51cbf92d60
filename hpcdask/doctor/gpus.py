"""GPUs: what NVML tells of them, and what of that is wrong. No CUDA call is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hpcdask.gpu.devices import EACH_A_GPU

from . import device_memory
from .findings import Facts, Finding, Reporter, amount, spans, which
from .queue import granted

GROUP = "GPUs"
MODES = {1: "exclusive (thread)", 2: "prohibited", 3: "exclusive (process)"}
#: Clock limits that heat or a weak supply cause (NVML's clocks event reasons).
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
RESET = "Tell the site's staff, and leave the GPU out with CUDA_VISIBLE_DEVICES until then"


def check(facts: Facts) -> list[Finding]:
    """What the GPUs of one node say: those that its ranks see, taken together."""
    say = Reporter(GROUP)
    known = facts["gpus"]
    if not known["device_files"] and not known["gpus"]:
        return [_none_here(say, facts)]
    gpus = known["gpus"]
    if not gpus:
        return [
            say.warning(
                "GPUs",
                f"none of this node's may be used{_hidden_by(facts)}",
                how_to_get(facts),
            )
        ]
    found = [
        say.ok("driver", f"{known['driver']}, runs CUDA {'.'.join(map(str, known['cuda']))}"),
        say.ok("GPUs", _names(gpus)),
        *_hidden(say, facts),
    ]
    for topic, look in CHECKS.items():
        found += look(say, topic, gpus)
    found += _nvlink(say, facts, gpus)
    found += device_memory.check(say, facts)
    found += _cores(say, facts, gpus)
    return found


def how_to_get(facts: Facts) -> str:
    """How to get a GPU, in the queueing system's words."""
    queue = facts.get("queue", {})
    if queue.get("request"):
        return f"Request them, for example {queue['request']}"
    return "Check nvidia-smi and CUDA_VISIBLE_DEVICES here"


def _none_here(say: Reporter, facts: Facts) -> Finding:
    queue = facts.get("queue", {})
    if given := granted(queue):
        return say.warning(
            "GPUs",
            f"no driver in sight, but the job has GPUs ({given})",
            "Pass them into the container: apptainer exec --nv, or docker run --gpus all. Outside "
            "of one, see nvidia-smi on this node, and whether the step has them "
            f"(srun {EACH_A_GPU})",
        )
    if queue.get("job"):
        return say.warning(
            "GPUs",
            "no NVIDIA GPU here, inside a job",
            f"{how_to_get(facts)}, if it should compute on GPUs",
        )
    return say.ok(
        "GPUs",
        "no NVIDIA GPU here",
        f"Run it where the workers will be: srun {EACH_A_GPU} hpcdask doctor",
    )


def _hidden_by(facts: Facts) -> str:
    visible = facts["process"][0]["env"].get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"


def _names(gpus: list[dict[str, Any]]) -> str:
    kinds = Counter((gpu["name"], amount(gpu["memory"])) for gpu in gpus)
    return ", ".join(f"{count} x {name}, {memory}" for (name, memory), count in kinds.items())


def _hidden(say: Reporter, facts: Facts) -> Iterator[Finding]:
    """GPUs that a cgroup keeps from a rank although another has them, or from the whole job."""
    fabrics = list(facts.get("fabrics", {}).values())
    whole = {gpu["uuid"] for gpu in facts["gpus"]["gpus"] if not gpu["parent"]}
    if any(whole - set(fabric["gpus"]) for fabric in fabrics):
        yield say.slow(
            "confined",
            "a cgroup keeps the ranks from each other's GPUs",
            "NVLink is not used between them (no CUDA IPC): let jobs have whole nodes, or start "
            "the ranks with srun --gpu-bind=none",
        )
    elif hidden := max((fabric["hidden_gpus"] for fabric in fabrics), default=0):
        yield say.ok(
            "confined",
            f"{hidden} of this node's GPUs belong to other jobs",
            "Between such jobs NVLink is not used (no CUDA IPC): for a cluster of jobs, let each "
            "have a whole node",
        )


def _health(say: Reporter, topic: str, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    pending = [gpu for gpu in gpus if gpu.get("retirement_pending")]
    failed = [gpu for gpu in gpus if gpu.get("remap_failed")]
    errors = [gpu for gpu in gpus if gpu.get("ecc_uncorrected")]
    if failed:
        yield say.error(topic, f"{which(gpus, failed)}memory rows could not be remapped", RESET)
    if pending:
        yield say.warning(
            topic,
            f"{which(gpus, pending)}memory waits to be retired",
            "The GPU needs a reset: tell the site's staff",
        )
    if errors:
        count = sum(gpu["ecc_uncorrected"] for gpu in errors)
        yield say.warning(
            topic, f"{which(gpus, errors)}{count} uncorrected since the driver started", RESET
        )
    if not (failed or pending or errors):
        on = [gpu for gpu in gpus if gpu.get("ecc_uncorrected") is not None]
        yield say.ok(topic, "no uncorrected memory errors" if on else "no ECC counters")


def _pcie(say: Reporter, topic: str, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.get("pcie_width")]
    narrow = [gpu for gpu in known if gpu["pcie_width"] < (gpu["pcie_max_width"] or 0)]
    links = Counter(f"gen {gpu['pcie_max_gen'] or '?'} x{gpu['pcie_width']}" for gpu in known)
    text = ", ".join(links)
    if narrow:
        yield say.slow(
            topic,
            f"{which(gpus, narrow)}x{narrow[0]['pcie_width']} of x{narrow[0]['pcie_max_width']} "
            f"lanes in use",
            "Copies between host and GPU are slower by as much: tell the site's staff, or choose "
            "another node",
        )
    elif known:
        yield say.ok(topic, text)


def _mode(say: Reporter, topic: str, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    for number, words in MODES.items():
        if there := [gpu for gpu in gpus if gpu.get("compute_mode") == number]:
            if number == 2:
                yield say.error(topic, f"{which(gpus, there)}{words}", "Use another node or GPU")
            else:
                yield say.warning(
                    topic,
                    f"{which(gpus, there)}{words}",
                    "Only one process can use such a GPU: with ucx, or --oversubscribe, others "
                    "fail. Ask for the default mode (nvidia-smi -c 0; SLURM: "
                    "--gpu_cmode=shared where the site allows it)",
                )


def _persistence(say: Reporter, topic: str, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    if off := [gpu for gpu in gpus if gpu.get("persistence") is False]:
        yield say.ok(
            topic, f"{which(gpus, off)}off", "The first use of an idle GPU takes some seconds more"
        )


def _clocks(say: Reporter, topic: str, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    for bit, cause in SLOWDOWNS.items():
        if slow := [gpu for gpu in gpus if (gpu.get("clock_limits") or 0) & bit]:
            yield say.slow(
                topic,
                f"{which(gpus, slow)}slowed down by the driver ({cause})",
                "It computes slower than its peers: tell the site's staff, or choose another node",
            )
            return


def _nvlink(say: Reporter, facts: Facts, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    fabric = facts.get("fabric", {})
    seen = {gpu["uuid"] for gpu in gpus}
    if len(seen) < 2 or "nvlink" not in fabric:
        return
    if seen - set(fabric["gpus"]) and not any(gpu["parent"] for gpu in gpus):
        return  # no rank sees all
    if any(gpu["parent"] for gpu in gpus):
        yield say.ok("NVLink", "not between MIG slices")
        return
    every = len(seen) * (len(seen) - 1) // 2
    joined = [pair for pair in fabric["nvlink"] if seen.issuperset(pair)]
    unknown = [pair for pair in fabric["nvlink_unknown"] if seen.issuperset(pair)]
    if len(joined) == every:
        yield say.ok("NVLink", "between all GPUs")
    elif unknown:
        yield say.ok("NVLink", f"NVML does not tell for {len(unknown)} of {every} pairs of GPUs")
    elif joined:
        yield say.ok(
            "NVLink", f"between {len(joined)} of {every} pairs of GPUs: {_matrix(gpus, joined)}"
        )
    else:
        yield say.ok("NVLink", "not between these GPUs")


def _links(say: Reporter, topic: str, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.get("nvlinks") and not gpu["parent"]]
    most: dict[str, int] = {}
    for gpu in known:
        most[gpu["name"]] = max(most.get(gpu["name"], 0), gpu["nvlinks"])
    if lacking := [gpu for gpu in known if gpu["nvlinks"] < most[gpu["name"]]]:
        first = lacking[0]
        yield say.slow(
            topic,
            f"{which(gpus, lacking)}{first['nvlinks']} of {most[first['name']]} links up",
            "It exchanges data slower than its peers: tell the site's staff, or leave the GPU out "
            "with CUDA_VISIBLE_DEVICES",
        )
    elif known:
        counts = " or ".join(map(str, dict.fromkeys(most.values())))
        yield say.ok(topic, f"{which(gpus, known)}{counts} up on each")


def _matrix(gpus: list[dict[str, Any]], joined: list[list[str]]) -> str:
    """Which GPU reaches which, by their numbers: ``0-1 2-3``."""
    number = {gpu["uuid"]: gpu["index"] for gpu in gpus}
    peers: dict[int, set[int]] = {}
    for first, second in joined:
        peers.setdefault(number[first], set()).add(number[second])
    return ", ".join(f"{index} to {spans(there)}" for index, there in sorted(peers.items()))


def _cores(say: Reporter, facts: Facts, gpus: list[dict[str, Any]]) -> Iterator[Finding]:
    owned = {core for process in facts["process"] for core in process["cores"]}
    placed = [gpu for gpu in gpus if gpu["cores"]]
    far = [gpu for gpu in placed if not owned & set(gpu["cores"])]
    if far:
        yield say.slow(
            "NUMA",
            f"{which(gpus, far)}none of the {len(owned)} cores that may be used "
            f"({spans(owned)}) is near (near: {spans(far[0]['cores'])})",
            "Copies between host and GPU cross the node: request cores near the GPUs "
            "(srun --gpu-bind=closest), or all cores of the node",
        )
    elif placed:
        nodes = sorted({gpu["numa"] for gpu in placed if gpu.get("numa") is not None})
        where = f" (NUMA nodes {spans(nodes)})" if nodes else ""
        yield say.ok("NUMA", f"every GPU has cores near it{where}")


CHECKS = {
    "memory errors": _health,
    "PCIe": _pcie,
    "compute mode": _mode,
    "persistence mode": _persistence,
    "clocks": _clocks,
    "NVLink links": _links,
}
