"""The queueing system's job: what it was given, and whether each rank has its GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from hpcdask.errors import DeviceError
from hpcdask.gpu.devices import EACH_A_GPU, Gpu
from hpcdask.node.placement import Inventory
from hpcdask.queues.environment import job_id, title_and_request
from hpcdask.runner.plan import assign_gpus

from .findings import Facts, Finding, Reporter, known_gpus

say = Reporter("job")
#: Seconds for a command of SLURM; srun only looks into its own folders for these.
COMMAND_DEADLINE_S = 8.0
#: What the systems tell a job of its GPUs.
GPU_VARIABLES = re.compile(
    r"SLURM_(GPUS|GPUS_PER_\w+|GPUS_ON_NODE|JOB_GPUS|STEP_GPUS|GPU_BIND|GRES|TRES_PER_\w+"
    r"|JOB_GRES|CPUS_PER_GPU|MEM_PER_GPU)$|PBS_NGPUS$|PBS_GPUFILE$|LSB_GPU_\w+$|SGE_HGR_gpu$"
    r"|OAR_RESOURCE_PROPERTIES_FILE$|_CONDOR_AssignedGPUs$|FLUX_GPUS\w*$"
)


def read(environ: Mapping[str, str] | None = None) -> Facts:
    """The job, and SLURM's version and MPI plugins where there is an srun."""
    environ = os.environ if environ is None else environ
    title, request = title_and_request(environ)
    known: Facts = {
        "system": title,
        "job": job_id(environ),
        "request": request,
        "gpus": {name: value for name, value in environ.items() if GPU_VARIABLES.match(name)},
        "step": environ.get("SLURM_STEP_ID", "") if "SLURM_JOB_ID" in environ else "",
    }
    if shutil.which("srun"):
        known["srun"] = _output(["srun", "--version"]).strip()
        known["mpi"] = parse_plugins(_output(["srun", "--mpi=list"]))
        if not known["job"] and known["srun"].startswith("slurm") and shutil.which("scontrol"):
            # of a job with many nodes, all would ask
            known["controller"] = " ".join(_output(["scontrol", "ping"]).split())
    return known


def _output(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{argv[0]} does not answer: {error}"
    return done.stdout


def parse_plugins(text: str) -> list[str]:
    """``none``, ``pmi2``, ``pmix`` ... from what ``srun --mpi=list`` prints."""
    words = (line.replace("srun:", "").strip() for line in text.splitlines())
    return sorted({word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word)})


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings on the job on one node."""
    known = facts["queue"]
    if known["job"]:
        yield say.ok("job", f"{known['system']} {known['job'].partition('.r')[0]}")
        gpus = " ".join(f"{name}={value}" for name, value in sorted(known["gpus"].items()))
        yield say.ok("GPUs of the job", gpus or "none, by its variables")
    if known.get("srun", "").startswith("slurm"):
        plugins = ", ".join(known["mpi"]) or "unknown"
        yield say.ok("srun", f"{known['srun']}, MPI plugins {plugins}")
        yield from _plugins(facts)
        if (says := known.get("controller")) and " is UP" not in says:
            yield say.warning(
                "SLURM",
                f"its controller does not answer, so nothing can be submitted from here: {says}",
                "See scontrol ping, and munge -n | unmunge; tell the site's staff",
            )
    elif "srun" in known:
        lines = known["srun"].splitlines() or ["prints nothing"]
        last = lines[-1].strip()[:120]  # which says what came of those before
        advice = "See whether SLURM works on this node: srun --version"
        if known["job"]:
            yield say.warning("srun", last, advice)
        else:
            yield say.note("srun", f"does not work here, and may not be needed: {last}", advice)


def _plugins(facts: Facts) -> Iterator[Finding]:
    """Yield a finding on whether srun can start the MPI that mpi4py loads."""
    library, plugins = facts.get("mpi", {}).get("library", ""), facts["queue"]["mpi"]
    wanted = "pmix" if "Open MPI" in library else "pmi2"
    if library and plugins and not any(name.startswith(wanted) for name in plugins):
        yield say.note(
            "srun and MPI",
            f"no plugin {wanted} for {library}",
            "Start hpcdask with srun --mpi=none, which needs no MPI; programs of your own with "
            "mpirun",
        )


def _views(facts: Facts, ranks: Sequence[int]) -> list[Inventory]:
    """Return what the ranks of one node see, for the choice of devices."""
    by_uuid = {gpu.uuid: gpu for gpu in known_gpus(facts)}
    return [
        Inventory(rank, "this node", place, tuple(map(by_uuid.__getitem__, seen)), (), 0)
        for place, (rank, seen) in enumerate(zip(ranks, facts["gpus"]["seen"], strict=True))
    ]


def assigned(facts: Facts, ranks: Sequence[int]) -> dict[int, list[Gpu]]:
    """The GPUs of each rank's workers on one node; where that is an error, those that it sees."""
    if "gpus" not in facts:
        return {rank: [] for rank in ranks}
    views = _views(facts, ranks)
    if len(ranks) == 1 or not facts["gpus"]["gpus"]:
        return {view.rank: list(view.gpus) for view in views}
    try:
        given = assign_gpus(views, device="cuda", oversubscribe=False, job=None)
    except DeviceError:
        return {view.rank: list(view.gpus) for view in views}
    return {rank: [gpu for gpu in group if gpu] for rank, group in given.items()}


def check_ranks(facts: Facts, ranks: Sequence[int]) -> Iterator[Finding]:
    """Yield a finding on whether each rank of a node gets a GPU of its own."""
    topic, gpus = "GPU of each rank", facts["gpus"]["gpus"]
    if not gpus or len(ranks) < 2:
        return
    views = _views(facts, ranks)
    try:
        assign_gpus(views, device="cuda", oversubscribe=False, job=None)
    except DeviceError as error:
        value, _, advice = str(error).partition(": ")
        yield say.error(topic, value, advice or f"Request one for each: {EACH_A_GPU}")
        return
    if idle := len(gpus) - len(ranks):
        value = f"{len(ranks)} ranks for {len(gpus)} GPUs: {idle} without work"
        yield say.warning(topic, value, f"Start {len(gpus)} ranks on each node")
    else:
        every = all(len(view.gpus) == len(gpus) for view in views)
        yield say.ok(topic, "each sees all and takes its own" if every else "each sees its own")
