"""GPUs: what NVML tells of them, and what of that is wrong. No CUDA call is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hpcdask.comm.fabric import Fabric
from hpcdask.comm.topology import NodeLinks, confined
from hpcdask.gpu.devices import EACH_A_GPU
from hpcdask.logs import spans
from hpcdask.queues.environment import granted

from . import device_memory
from .findings import Facts, Finding, Reporter, amount, known_gpus, which

say = Reporter("GPUs")
Gpus = list[dict[str, Any]]
#: Modes in which a GPU is not for every process.
MODES = {1: "exclusive (thread)", 2: "prohibited", 3: "exclusive (process)"}
#: Clock limits that heat or a weak supply cause (NVML's clocks event reasons).
SLOWDOWNS = {0x8: "hardware slowdown", 0x60: "heat", 0x80: "power brake"}
RESET = "Tell the site's staff, and leave the GPU out with CUDA_VISIBLE_DEVICES until then"


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings on the GPUs of one node: those that its ranks see, taken together."""
    known, gpus = facts["gpus"], facts["gpus"]["gpus"]
    if not gpus:
        yield _none_that_is_used(facts) if known["device_files"] else _none_here(facts)
        return
    kinds = Counter((gpu["name"], amount(gpu["memory"])) for gpu in gpus)
    names = [f"{count} x {name}, {memory}" for (name, memory), count in kinds.items()]
    yield say.ok("driver", f"{known['driver']}, runs CUDA {'.'.join(map(str, known['cuda']))}")
    yield say.ok("GPUs", ", ".join(names))
    yield from _confined(facts)
    yield from _health(gpus)
    yield from _pcie(gpus)
    yield from _mode(gpus)
    if off := [gpu for gpu in gpus if gpu.get("persistence") is False]:
        hint = "The first use of an idle GPU takes some seconds more"
        yield say.ok("persistence mode", f"{which(gpus, off)}off", hint)
    yield from _clocks(gpus)
    yield from _links(gpus)
    yield from _nvlink(facts, gpus)
    yield from device_memory.check(facts)
    yield from _cores(facts, gpus)


def _how_to_get(facts: Facts) -> str:
    """Return advice on how to get a GPU, in the queueing system's words."""
    if request := facts.get("queue", {}).get("request"):
        return f"Request them, for example {request}"
    return "Check nvidia-smi and CUDA_VISIBLE_DEVICES here"


def _none_that_is_used(facts: Facts) -> Finding:
    visible = facts["process"][0]["env"].get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return say.warning("GPUs", f"none of this node's may be used{hidden}", _how_to_get(facts))


def _none_here(facts: Facts) -> Finding:
    queue = facts.get("queue", {})
    if given := granted(queue.get("gpus", {})):
        return say.warning(
            "GPUs",
            f"the NVIDIA driver was not found, but the job has GPUs ({given})",
            "Pass them into the container: apptainer exec --nv, or docker run --gpus all. Outside "
            "of one, see nvidia-smi on this node, and whether the step has them "
            f"(srun {EACH_A_GPU})",
        )
    if queue.get("job"):
        advice = f"{_how_to_get(facts)}. To compute on the CPU: hpcdask doctor --device cpu"
        return say.warning("GPUs", "no NVIDIA GPU here, inside a job", advice)
    hint = f"Run it where the workers will be: srun {EACH_A_GPU} hpcdask doctor"
    return say.ok("GPUs", "no NVIDIA GPU here", hint)


def _confined(facts: Facts) -> Iterator[Finding]:
    """GPUs that a cgroup keeps from a rank although another has them, or from the whole job."""
    fabrics = list(map(Fabric.from_json, facts["fabrics"].values()))
    if not fabrics:
        return
    if confined([NodeLinks("", known_gpus(facts), known) for known in fabrics]):
        lost = "a cgroup keeps the ranks from each other's GPUs"
        advice = (
            "NVLink is not used between them (no CUDA IPC): let jobs have whole nodes, or start "
            "the ranks with --gpu-bind=none"
        )
        yield say.slow("confined", lost, advice)
    elif hidden := max(one.hidden_gpus for one in fabrics):
        yield say.ok(
            "confined",
            f"{hidden} of this node's GPUs belong to other jobs",
            "Between such jobs NVLink is not used (no CUDA IPC): for a cluster of jobs, let each "
            "have a whole node",
        )


def _health(gpus: Gpus) -> Iterator[Finding]:
    topic = "memory errors"
    pending = [gpu for gpu in gpus if gpu.get("retirement_pending")]
    failed = [gpu for gpu in gpus if gpu.get("remap_failed")]
    errors = [gpu for gpu in gpus if gpu.get("ecc_uncorrected")]
    if failed:
        yield say.error(topic, f"{which(gpus, failed)}memory rows could not be remapped", RESET)
    if pending:
        value = f"{which(gpus, pending)}memory waits to be retired"
        yield say.warning(topic, value, "The GPU needs a reset: tell the site's staff")
    if errors:
        count = sum(gpu["ecc_uncorrected"] for gpu in errors)
        value = f"{which(gpus, errors)}{count} uncorrected since the driver started"
        yield say.warning(topic, value, RESET)
    if not (failed or pending or errors):
        on = any(gpu.get("ecc_uncorrected") is not None for gpu in gpus)
        yield say.ok(topic, "no uncorrected memory errors" if on else "no ECC counters")


def _pcie(gpus: Gpus) -> Iterator[Finding]:
    known = [gpu for gpu in gpus if gpu.get("pcie_width")]
    if narrow := [gpu for gpu in known if gpu["pcie_width"] < (gpu["pcie_max_width"] or 0)]:
        width, most = narrow[0]["pcie_width"], narrow[0]["pcie_max_width"]
        yield say.slow(
            "PCIe",
            f"{which(gpus, narrow)}x{width} of x{most} lanes in use",
            "Copies between host and GPU are slower by as much: tell the site's staff, or choose "
            "another node",
        )
    elif known:
        links = (f"gen {gpu['pcie_max_gen'] or '?'} x{gpu['pcie_width']}" for gpu in known)
        yield say.ok("PCIe", ", ".join(dict.fromkeys(links)))


def _mode(gpus: Gpus) -> Iterator[Finding]:
    for number, words in MODES.items():
        there = [gpu for gpu in gpus if gpu.get("compute_mode") == number]
        value = f"{which(gpus, there)}{words}"
        if there and words == "prohibited":
            yield say.error("compute mode", value, "Use another node or GPU")
        elif there:
            yield say.warning(
                "compute mode",
                value,
                "Only one process can use such a GPU: with ucx, or --oversubscribe, others fail. "
                "Ask for the default mode (nvidia-smi -c 0; SLURM: --gpu_cmode=shared where the "
                "site allows it)",
            )


def _clocks(gpus: Gpus) -> Iterator[Finding]:
    for bits, cause in SLOWDOWNS.items():
        if slow := [gpu for gpu in gpus if (gpu.get("clock_limits") or 0) & bits]:
            yield say.slow(
                "clocks",
                f"{which(gpus, slow)}slowed down by the driver ({cause})",
                "It computes slower than its peers: tell the site's staff, or choose another node",
            )
            return


def _links(gpus: Gpus) -> Iterator[Finding]:
    topic = "NVLink links"
    known = [gpu for gpu in gpus if gpu.get("nvlinks") and not gpu["sliced"]]
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


def _nvlink(facts: Facts, gpus: Gpus) -> Iterator[Finding]:
    fabric, sliced = facts.get("fabric", {}), any(gpu["sliced"] for gpu in gpus)
    seen = {gpu["uuid"] for gpu in gpus}
    if len(seen) < 2 or "nvlink" not in fabric:
        return
    if seen - set(fabric["gpus"]) and not sliced:
        return  # no rank sees all
    every = len(seen) * (len(seen) - 1) // 2
    joined = [pair for pair in fabric["nvlink"] if seen.issuperset(pair)]
    if sliced:
        value = "not between MIG slices"
    elif len(joined) == every:
        value = "between all GPUs"
    elif joined:
        value = f"between {len(joined)} of {every} pairs of GPUs: {_matrix(gpus, joined)}"
    else:
        value = "not between these GPUs"
    yield say.ok("NVLink", value)


def _matrix(gpus: Gpus, joined: list[list[str]]) -> str:
    """Return the pairs of GPUs that reach each other, by number: ``0-1 2-3``."""
    number = {gpu["uuid"]: gpu["index"] for gpu in gpus}
    peers: dict[int, set[int]] = {}
    for first, second in joined:
        peers.setdefault(number[first], set()).add(number[second])
    return ", ".join(f"{index} to {spans(there)}" for index, there in sorted(peers.items()))


def _cores(facts: Facts, gpus: Gpus) -> Iterator[Finding]:
    owned = {core for process in facts["process"] for core in process["cores"]}
    placed = [gpu for gpu in gpus if gpu["cores"]]
    if far := [gpu for gpu in placed if not owned & set(gpu["cores"])]:
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
