"""The queueing system's job: what it was given, and whether each rank has its GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpcdask.errors import DeviceError
from hpcdask.gpu.devices import EACH_A_GPU
from hpcdask.queues.environment import job_id, title_and_request
from hpcdask.spec.records import Record

from .findings import Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("job")
#: Seconds for a command of SLURM; srun only looks into its own folders for these.
COMMAND_DEADLINE_S = 8.0
#: What the systems tell a job of its GPUs.
GPU_VARIABLES = re.compile(
    r"SLURM_(GPUS|GPUS_PER_\w+|GPUS_ON_NODE|JOB_GPUS|STEP_GPUS|GPU_BIND|GRES|TRES_PER_\w+"
    r"|JOB_GRES|CPUS_PER_GPU|MEM_PER_GPU)$|PBS_NGPUS$|PBS_GPUFILE$|LSB_GPU_\w+$|SGE_HGR_gpu$"
    r"|OAR_RESOURCE_PROPERTIES_FILE$|_CONDOR_AssignedGPUs$|FLUX_GPUS\w*$"
)


@dataclass(frozen=True)
class QueueFacts(Record):
    """Job of this process, and its variables about GPUs; what SLURM's commands print.

    `request` is how to ask the system for a GPU. Without an ``srun``, `srun` is None.
    """

    system: str = ""
    job: str | None = None
    request: str = ""
    gpus: dict[str, str] = field(default_factory=dict)
    srun: str | None = None
    mpi: tuple[str, ...] = ()
    controller: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> QueueFacts:
        """Read the job's variables, and ask SLURM where there is an ``srun``."""
        environ = os.environ if environ is None else environ
        (system, request), job = title_and_request(environ), job_id(environ)
        gpus = {name: value for name, value in environ.items() if GPU_VARIABLES.match(name)}
        if not shutil.which("srun"):
            return cls(system, job, request, gpus)
        srun, controller = _output("srun", "--version").strip(), ""
        if not job and srun.startswith("slurm") and shutil.which("scontrol"):
            # of a job with many nodes, all would ask
            controller = " ".join(_output("scontrol", "ping").split())
        plugins = parse_plugins(_output("srun", "--mpi=list"))
        return cls(system, job, request, gpus, srun, plugins, controller)


def _output(*argv: str) -> str:
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


def parse_plugins(text: str) -> tuple[str, ...]:
    """Return ``none``, ``pmi2``, ``pmix`` ... from what ``srun --mpi=list`` prints."""
    words = (line.replace("srun:", "").strip() for line in text.splitlines())
    return tuple(sorted({word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word)}))


def check(known: QueueFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the job on one node."""
    if known.job:
        yield say.ok("job", f"{known.system} {known.job.partition('.r')[0]}")
        gpus = " ".join(f"{name}={value}" for name, value in sorted(known.gpus.items()))
        yield say.ok("GPUs of the job", gpus or "none, by its variables")
    if known.srun is None:
        return
    if not known.srun.startswith("slurm"):
        lines = known.srun.splitlines() or ["prints nothing"]
        last = lines[-1].strip()[:120]  # which says what came of those before
        advice = "See whether SLURM works on this node: srun --version"
        if known.job:
            yield say.warning("srun", last, advice)
        else:
            yield say.note("srun", f"does not work here, and may not be needed: {last}", advice)
        return
    yield say.ok("srun", f"{known.srun}, MPI plugins {', '.join(known.mpi) or 'unknown'}")
    library = node.facts.mpi.library if node.facts.mpi else ""
    wanted = "pmix" if "Open MPI" in library else "pmi2"
    if library and known.mpi and not any(name.startswith(wanted) for name in known.mpi):
        yield say.note(
            "srun and MPI",
            f"no plugin {wanted} for {library}",
            "Start hpcdask with srun --mpi=none, which needs no MPI; programs of your own with "
            "mpirun",
        )
    if known.controller and " is UP" not in known.controller:
        yield say.warning(
            "SLURM",
            f"its controller does not answer, so nothing can be submitted from here: "
            f"{known.controller}",
            "See scontrol ping, and munge -n | unmunge; tell the site's staff",
        )


def check_ranks(node: Node) -> Iterator[Finding]:
    """Yield a finding on whether each rank of a node gets a GPU of its own."""
    topic, gpus, ranks = "GPU of each rank", node.gpus, node.ranks
    if not gpus or len(ranks) < 2:
        return
    try:
        node.assign()
    except DeviceError as error:
        value, _, advice = str(error).partition(": ")
        yield say.error(topic, value, advice or f"Request one for each: {EACH_A_GPU}")
        return
    if idle := len(gpus) - len(ranks):
        value = f"{len(ranks)} ranks for {len(gpus)} GPUs: {idle} without work"
        yield say.warning(topic, value, f"Start {len(gpus)} ranks on each node")
    else:
        every = all(len(node.seen(rank)) == len(gpus) for rank in ranks)
        yield say.ok(topic, "each sees all and takes its own" if every else "each sees its own")
