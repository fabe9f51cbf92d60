"""Job of the queueing system: its GPUs, SLURM's commands, and the GPU of each rank."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from subprocess import DEVNULL, PIPE, STDOUT
from typing import TYPE_CHECKING, Any

from hpcdask.errors import DeviceError
from hpcdask.gpu.devices import EACH_A_GPU
from hpcdask.queues.environment import job_id, title_and_request
from hpcdask.spec.records import Record

from .findings import Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("job")
#: Seconds for a command of SLURM; srun only reads its own folders for these.
COMMAND_DEADLINE_S = 8.0
#: Variables by which the systems tell a job of its GPUs.
GPU_VARIABLES = re.compile(
    r"SLURM_(GPUS|GPUS_PER_\w+|GPUS_ON_NODE|JOB_GPUS|STEP_GPUS|GPU_BIND|GRES|TRES_PER_\w+"
    r"|JOB_GRES|CPUS_PER_GPU|MEM_PER_GPU)$|PBS_NGPUS$|PBS_GPUFILE$|LSB_GPU_\w+$|SGE_HGR_gpu$"
    r"|OAR_RESOURCE_PROPERTIES_FILE$|_CONDOR_AssignedGPUs$|FLUX_GPUS\w*$"
)


@dataclass(frozen=True)
class QueueFacts(Record):
    """Job of this process, its variables about GPUs, and the output of SLURM's commands.

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
    """Return all that a command prints, or why it does not answer."""
    pipes: dict[str, Any] = {"stdin": DEVNULL, "stdout": PIPE, "stderr": STDOUT, "text": True}
    try:
        return str(subprocess.run(argv, timeout=COMMAND_DEADLINE_S, check=False, **pipes).stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{argv[0]} does not answer: {error}"


def parse_plugins(text: str) -> tuple[str, ...]:
    """Return ``none``, ``pmi2``, ``pmix`` ... from the output of ``srun --mpi=list``."""
    words = (line.replace("srun:", "").strip() for line in text.splitlines())
    return tuple(sorted({word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word)}))


def check(known: QueueFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the job on one node, and on SLURM."""
    if known.job:
        yield say.ok("job", f"{known.system} {known.job.partition('.r')[0]}")
        gpus = " ".join(f"{name}={value}" for name, value in sorted(known.gpus.items()))
        yield say.ok("GPUs of the job", gpus or "none, by its variables")
    if known.srun is None:
        return
    if not known.srun.startswith("slurm"):
        lines = known.srun.splitlines() or ["prints nothing"]
        last = lines[-1].strip()[:120]  # the effect of the lines before it
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
        advice = "Start hpcdask with srun --mpi=none, and programs of your own with mpirun"
        yield say.note("srun and MPI", f"no plugin {wanted} for {library}", advice)
    if known.controller and " is UP" not in known.controller:
        value = f"its controller does not answer, so nothing can be submitted: {known.controller}"
        advice = "See scontrol ping, and munge -n | unmunge; tell the site's staff"
        yield say.warning("SLURM", value, advice)


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
