"""WorkerSpec: everything a worker needs, parsed and checked once.

Every launcher turns its options into one, and every process that it starts gets it back from argv.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, get_args, get_type_hints

from .argv import negative, option_name
from .keywords import Device, Keyword, Protocol, RunKeywords
from .names import worker_name
from .parsing import (
    Parser,
    configured_port_range,
    parse_choice,
    parse_count,
    parse_deadline,
    parse_device_memory,
    parse_groups,
    parse_libraries,
    parse_memory,
    parse_port_range,
    parse_resources,
    parse_seconds,
    parse_strings,
    parse_switch,
)


def _option(
    text: str,
    parse: Parser = lambda value, name: value,
    default: Any = None,
    metavar: str | None = None,
) -> Any:
    return field(default=default, metadata={"help": text, "parse": parse, "metavar": metavar})


def keywords_of(spec: type) -> list[Keyword]:
    """Return the fields of a spec as keywords."""
    types = get_type_hints(RunKeywords)
    return [
        Keyword(item.name, types[item.name], item.metadata["help"], item.default)
        for item in dataclasses.fields(spec)
    ]


@dataclass(frozen=True)
class WorkerSpec:
    """Worker: its device, its memory, its threads, its network.

    Every field is also an option of ``python -m hpcdask.run`` (``memory_limit`` is
    ``--memory-limit``). Values may be given as text. Raises UsageError if one is not understood;
    the message names the accepted forms.
    """

    device: Device = _option(
        "What workers compute on. auto: GPUs where there are any, else the CPU. Default: auto.",
        partial(parse_choice, choices=get_args(Device)),
        default="auto",
        metavar="[auto|cuda|cpu]",
    )
    protocol: Protocol = _option(
        "How workers exchange data: tcp (TLS), or ucx (NVLink, InfiniBand). auto: ucx where NVLink "
        "or InfiniBand joins the GPUs, else tcp. Default: auto.",
        partial(parse_choice, choices=get_args(Protocol)),
        default="auto",
        metavar="[auto|tcp|ucx]",
    )
    interface: str | None = _option(
        "Network interface to listen on, such as ib0. auto: the fastest that all nodes have. "
        "Default: the one with the default route.",
        metavar="NAME",
    )
    port_range: str | None = _option(
        "Listen on ports of this range only, such as 20000-20999, for firewalls. Default: "
        "hpcdask.port-range of Dask's configuration, else any free ports.",
        parse_port_range,
    )
    nthreads: int | None = _option(
        "Threads per worker. Default: 1 with a GPU. On a CPU, workers share the cores.",
        parse_count,
    )
    memory_limit: int | None = _option(
        "Host memory per worker, such as 64GiB. Default: an equal share of the job's on the node.",
        parse_memory,
    )
    enable_nvlink: bool | None = _option(
        "Choose ucx as if NVLink joined the GPUs of each node, or keep ucx from NVLink. Default: "
        "as NVML says.",
        parse_switch,
    )
    rmm_pool_size: int | float | None = _option(
        "Device memory of the RMM pool at the start, such as 100GiB or 0.8. The pool grows. 0: no "
        "pool. Default: half of the worker's device.",
        parse_device_memory,
    )
    rmm_async: bool = _option(
        "Use RMM's asynchronous allocator instead of the pool. Needs tcp.", parse_switch, False
    )
    rmm_allocator_external_lib_list: tuple[str, ...] = _option(
        "Libraries that allocate through RMM: cupy, torch, numba, or none. A pool needs cupy. "
        "Default: cupy.",
        parse_libraries,
        default=("cupy",),
    )
    device_memory_limit: int | float | None = _option(
        "Spill to host memory above this much device memory, such as 100GiB or 0.8. 0: never. "
        "Default: 0.8.",
        parse_device_memory,
    )
    local_directory: str | None = _option(
        "Node-local folder for spilled data and scratch. Each node expands variables in it. "
        "Default: temporary-directory of Dask's configuration, else $TMPDIR.",
        metavar="FOLDER",
    )
    name: str | None = _option(
        "Prefix of the workers' names. Default: the host's name.", metavar="PREFIX"
    )
    resources: dict[str, float] | None = _option(
        'Abstract resources of each worker, such as "MEM=10e9", beside its own GPU=1 or CPU=1.',
        parse_resources,
    )
    preload: tuple[str, ...] = _option(
        "Module or file that each worker loads at its start. May be repeated.", parse_strings, ()
    )
    preload_nanny: tuple[str, ...] = _option(
        "Module or file that each nanny loads at its start. May be repeated.", parse_strings, ()
    )
    lifetime: float | None = _option(
        "Close each worker after this time, such as 50min.", parse_seconds
    )
    lifetime_stagger: float | None = _option(
        "Spread the lifetimes by up to this time.", parse_seconds
    )
    lifetime_restart: bool = _option(
        "Start a new worker when a lifetime is over.", parse_switch, False
    )
    death_timeout: float | None = _option(
        "A worker ends when it finds no scheduler for this time. Default: 60 s.",
        parse_seconds,
        default=60.0,
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = item.metadata["parse"](getattr(self, item.name), option_name(item.name))
            object.__setattr__(self, item.name, value)

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> Self:
        """Like the constructor, but errors name keywords, and None is for what nobody gave."""
        values = {name: value for name, value in given.items() if value is not None}
        for item in dataclasses.fields(cls):
            if item.name in values:
                values[item.name] = item.metadata["parse"](values[item.name], item.name)
        return cls(**values)

    def configured(self) -> Self:
        """Return the spec with Dask's configuration where nobody gave anything."""
        return dataclasses.replace(self, port_range=self.port_range or configured_port_range())

    def all_resources(self, *, on_gpu: bool) -> dict[str, float]:
        """Return the resources of a worker: one of its kind of device, and those asked for."""
        return {"GPU" if on_gpu else "CPU": 1.0, **(self.resources or {})}

    def to_argv(self) -> list[str]:
        """Return the options that give this spec again: those that differ from the defaults."""
        argv: list[str] = []
        for item in dataclasses.fields(self):
            value, option = getattr(self, item.name), option_name(item.name)
            if value == item.default:
                continue
            if isinstance(value, bool):
                argv.append(option if value else negative(option))
            elif item.metadata["parse"] is parse_strings:
                argv += [word for text in value for word in (option, text)]
            elif isinstance(value, tuple):
                argv += [option, ",".join(value) or "none"]
            elif isinstance(value, dict):
                argv += [option, " ".join(f"{key}={number!r}" for key, number in value.items())]
            else:
                argv += [option, "none" if value is None else str(value)]
        return argv


@dataclass(frozen=True)
class RunSpec(WorkerSpec):
    """Run: a `WorkerSpec` and what the runner needs beside it."""

    scheduler_file: str | None = _option(
        "Write the cluster's address to this file, for hpcdask.connect(FILE) elsewhere.",
        metavar="FILE",
    )
    dashboard_address: str | None = _option(
        "Where the dashboard listens, such as :8787. Default: port 8787, or a free one. In a job "
        "on several nodes, or with --scheduler-file, --interface or no program, on all addresses; "
        "else on 127.0.0.1.",
        metavar="ADDRESS",
    )
    tls: bool = _option(
        "Encrypt and authenticate all tcp connections. Default: yes.", parse_switch, True
    )
    groups: tuple[str, ...] = _option(
        'Ranks of each node that compute on a GPU, and on the CPU, in this order, such as "gpu:4 '
        'cpu:2". auto: each as it sees a GPU or none. Default: all the same.',
        parse_groups,
        default=(),
    )
    oversubscribe: bool = _option(
        "Allow more ranks on a node than it has GPUs.", parse_switch, False
    )
    timeout: float = _option(
        "Give up when the cluster is not complete after this time. Default: 300 s.",
        parse_deadline,
        default=300.0,
    )
    workers_min: int | None = _option(
        "Start the program with this many workers, and go on while as many are left. "
        "Default: all; the loss of a rank ends the run.",
        parse_count,
    )

    def kinds(self) -> list[str]:
        """Return ``gpu`` or ``cpu`` for each rank of a node; nothing where each is what it sees."""
        counts = [group.partition(":") for group in self.groups if group != "auto"]
        return [kind for kind, _, count in counts for _ in range(int(count))]


@dataclass(frozen=True)
class JobSpec:
    """Request of a job, from the command line and the environment.

    `scheduler` is its address, `keys` the file of the cluster's credentials. `cluster`, its id or
    a group's, `job` and `restarts` are in the workers' names. `workers` is per node.
    """

    spec: WorkerSpec
    scheduler: str
    keys: str | None
    cluster: str
    job: str
    restarts: int
    workers: int

    def names(self, node: int, nodes: int = 1) -> list[str]:
        """Return the names of the workers on `nodes` nodes, from node number `node` on."""
        numbers = range(node * self.workers, (node + nodes) * self.workers)
        return [worker_name(self.cluster, self.job, self.restarts, number) for number in numbers]
