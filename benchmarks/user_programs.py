"""The programs in `programs/` on hpcdask and on its peers: the case `programs` of `peers.py`."""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launches import execute, mpirun

HERE = Path(__file__).parent
#: Command lines in `programs/`, those first that matter most: the time may be over before the last.
PROGRAMS = [
    "ready.py",
    "transpose_sum.py",
    "svd_compressed.py",
    "random_sum.py",
    "rechunk.py --method tasks",
    "rechunk.py",
    "map_overlap.py",
    "map_gather.py",
    "submit_result.py",
    "fft.py",
    "tall_svd.py",
    "matmul.py",
    "many_chunks.py",
    "empty_tasks.py",
    "time_loop.py",
    "actor.py",
    "groupby.py",
    "random_forest.py",
    "model_search.py",
]
PHASES = ("first", "later")
OURS = "hpcdask"
OVER = {"skipped": "the time was over"}
LOG: dict[str, Any] = {"file": sys.stderr, "flush": True}
#: A line of a program's last words that says why it failed.
ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Killed\w*)\b.*", re.MULTILINE)


@dataclass(frozen=True)
class Cluster:
    """What a program runs on: the command before it, and variables."""

    name: str
    command: list[str]
    environment: dict[str, str]


@dataclass
class Round:
    """What a program did on each cluster, by its name; or why it was not run."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: str = ""


def clusters(gpus: int, workers: int) -> dict[str, Cluster]:
    """hpcdask first, then the peers, by the names that `--peers` takes."""
    cpu = {} if gpus else {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"}
    if gpus:
        options = ["--oversubscribe"] if workers > gpus else []
    else:
        options = ["--device", "cpu", "--nthreads", "1"]
    runner = [*mpirun(workers), sys.executable, "-m", "hpcdask.run", *options]
    found = {"hpcdask": Cluster(OURS, runner, cpu)}

    def add(key: str, name: str, kind: str, launcher: Sequence[str] = (), **variables: str) -> None:
        command = [*launcher, sys.executable, str(HERE / "on_peer.py"), kind, str(workers)]
        found[key] = Cluster(name, command, cpu | variables)

    if gpus:
        shared = "; made to share GPUs" if workers > gpus else ""
        pool = 0.5 / -(-workers // gpus)
        tuned = {"protocol": "ucx", "rmm_pool_size": pool}
        said = ", ".join(f"{key}={value!r}" for key, value in tuned.items())
        tuned["rmm_allocator_external_lib_list"] = ["cupy"]
        add("default", f"LocalCUDACluster(){shared}", "local-cuda")
        name = f"LocalCUDACluster({said}, CuPy in the pool){shared}"
        add("tuned", name, "local-cuda", PEER_KEYWORDS=json.dumps(tuned))
    else:
        add("dask-mpi", f"dask-mpi ({workers + 2} ranks)", "dask-mpi", mpirun(workers + 2))
        add("local", "LocalCluster", "local")
    return found


def cases(options: argparse.Namespace, gpus: int) -> Iterator[dict[str, Any]]:
    """What a file of results gets after each round of a program: its rows, and what is left out."""
    workers = options.workers or gpus or 2
    on = clusters(gpus, workers)
    if unknown := set(options.peers or ()) - {*on}:
        raise SystemExit(f"--peers has no {', '.join(unknown)}: {', '.join(on)}")
    on = {key: on[key] for key in on if key == OURS or key in (options.peers or on)}
    peers = [cluster.name for cluster in on.values()][1:]
    arguments = ["--device", "cuda" if gpus else "cpu", "--workers", str(workers)]
    programs, start = options.programs or PROGRAMS, time.monotonic()
    if gpus:
        warm_up(programs, "cuda", min(60, options.budget))
    started = measure(
        list(on.values()),
        programs,
        [*arguments, "--runs", str(options.runs)],
        rounds=options.rounds,
        budget_s=options.budget - (time.monotonic() - start),
        deadline_s=options.deadline,
    )
    found: dict[str, list[dict[str, Any]]] = {}
    left_out: dict[str, str] = {}
    for program, rounds in started:
        found[program] = rows(program, rounds, peers)
        if not found[program]:
            left_out[program] = rounds[-1].skipped
        yield {"cases": found[program], "left_out": left_out, "workers": workers}
    for peer, phase, mean, count in summary([row for made in found.values() for row in made]):
        print(f"{peer}, {phase}: {mean:.3f}, the geometric mean of {count} programs", flush=True)
    if left_out:
        print("left out: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))


def warm_up(programs: Sequence[str], device: str, timeout: float) -> None:
    """Let nobody be the first to compile a kernel for the disk: see warm_up.py."""
    arrays = [name for name in programs if "RandomState" in source(name)]
    command = [sys.executable, str(HERE / "warm_up.py"), device, *arrays]
    ended = execute(command, {}, timeout)
    print(f"warm-up of {len(arrays)} programs: {ended.wall_s:.0f} s", **LOG)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    ours = parser.add_argument_group("--cases programs")
    ours.add_argument("--programs", action="append", metavar="'NAME.py [OPTIONS]'")
    ours.add_argument("--peers", action="append", help="default, tuned; dask-mpi, local (CPU)")
    ours.add_argument("--workers", type=int, help="one for each GPU; more share the GPUs")
    ours.add_argument("--runs", type=int, default=4, help="in one process, the first included")
    ours.add_argument("--budget", type=float, default=float("inf"), help="seconds for all")
    ours.add_argument("--deadline", type=float, default=120, help="seconds for one process")


def measure(
    on: Sequence[Cluster],
    programs: Sequence[str],
    arguments: Sequence[str],
    *,
    rounds: int = 3,
    budget_s: float = float("inf"),
    deadline_s: float = 120,
) -> Iterator[tuple[str, list[Round]]]:
    """Run programs on hpcdask and its peers in turn; yield one's rounds after each of them.

    All programs have their first round before any has its second, so that a budget leaves out as
    few as it can. A program that failed on a cluster is not tried there again.
    """
    end = time.monotonic() + budget_s
    made: dict[str, list[Round]] = {program: [] for program in programs}
    failed: dict[tuple[str, str], dict[str, Any]] = {}
    for number in range(rounds):
        for program, before in made.items():
            if before and before[-1].skipped:
                continue
            before.append(one := Round())
            for cluster in on if number % 2 == 0 else reversed(on):
                where = (program, cluster.name)
                result = failed.get(where)
                if result is None:
                    left_s = end - time.monotonic()
                    result = run(cluster, program, arguments, min(deadline_s, left_s))
                    if "failed" in result and time.monotonic() > end:
                        result = OVER
                    print(f"{' on '.join(where)}, {number + 1}/{rounds}: {told(result)}", **LOG)
                if "skipped" in result:
                    one.skipped = result["skipped"]
                    break
                if "failed" in result:
                    failed[where] = result
                one.results[cluster.name] = result
            yield program, before


def run(cluster: Cluster, program: str, arguments: Sequence[str], timeout: float) -> dict[str, Any]:
    """Seconds of a program's first run and of later ones; why it failed, or was skipped."""
    if timeout < 1:
        return OVER
    file, *own = shlex.split(program)
    command = [*cluster.command, str(HERE / "programs" / file), *own, *arguments]
    ended = execute(command, cluster.environment, timeout)
    lines = [json.loads(line) for line in ended.out.splitlines() if re.match(r"{.*}$", line)]
    skipped = next((line["skipped"] for line in lines if "skipped" in line), None)
    if skipped:
        return {"skipped": skipped}
    right = [line["seconds"] for line in lines if line["correct"]]
    result: dict[str, Any] = {"first": right[:1], "later": right[1:], "wall_s": ended.wall_s}
    if lines and "GB" in lines[0]:
        result["GB"] = lines[0]["GB"]
    if ended.code is None:
        result["failed"] = f"not over after {timeout:.0f} s"
    elif len(right) < len(lines):
        result |= {"failed": "a result is wrong", "first": [], "later": []}
    elif ended.code or not lines:
        errors = [found.group() for found in ERROR.finditer(ended.err)]
        # what workers say about the end of the connection comes after the reason
        reasons = [error for error in errors if "Closed" not in error] or errors
        reason = (reasons or ended.err.split("\n"))[-1].replace(str(HERE.parent), ".")
        result["failed"] = reason[:150] or f"exit code {ended.code}"
        print(ended.err[-3000:], **LOG)
    return result


def told(result: dict[str, Any]) -> str:
    """One result in words, for who watches."""
    if "skipped" in result:
        return f"left out: {result['skipped']}"
    seconds = " ".join(f"{one:.3f}" for one in result["first"] + result["later"])
    return f"{seconds} s" + (f", fails: {result['failed']}" if "failed" in result else "")


def rows(program: str, made: Sequence[Round], peers: Sequence[str]) -> list[dict[str, Any]]:
    """A program against each peer, its first runs and the later ones; one ratio per round."""
    found = []
    for peer in peers:
        pairs = [
            {"ours": one.results[OURS], "theirs": one.results[peer]}
            for one in made
            if {OURS, peer} <= one.results.keys()
        ]
        for phase in PHASES if pairs else ():
            row = {"case": program, "what": title(program), "peer": peer, "phase": phase}
            row |= {"rounds": len(pairs), "pairs": pairs if phase == "first" else []}
            seconds = [{who: median(pair[who][phase]) for who in pair} for pair in pairs]
            for who in ("ours", "theirs"):
                row[f"{who}_s"] = median([one[who] for one in seconds if one[who] is not None])
                failed = [pair[who]["failed"] for pair in pairs if "failed" in pair[who]]
                row |= {f"{who}_failed": failed[0]} if failed else {}
            ratios = [one["ours"] / one["theirs"] for one in seconds if all(one.values())]
            if ratios:
                row |= {"ratio": median(ratios), "ratio_min": min(ratios)}
                row |= {"ratio_max": max(ratios)}
            if row["ours_s"] or row["theirs_s"] or "ours_failed" in row or "theirs_failed" in row:
                found.append(row)
    return found


def median(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def title(program: str) -> str:
    """What a program does, in its own words."""
    return (ast.get_docstring(ast.parse(source(program))) or "").split("\n")[0].rstrip(".")


def source(program: str) -> str:
    """The text of a program."""
    return (HERE / "programs" / shlex.split(program)[0]).read_text()


def summary(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, float, int]]:
    """Geometric mean of the ratios for each peer and phase, and of how many programs."""
    for peer in dict.fromkeys(row["peer"] for row in found):
        for phase in PHASES:
            ratios = [
                row["ratio"]
                for row in found
                if (row["peer"], row["phase"]) == (peer, phase) and "ratio" in row
            ]
            if ratios:
                yield peer, phase, statistics.geometric_mean(ratios), len(ratios)


def tables(content: dict[str, Any]) -> str:
    """The part of the page that one file of results fills; nothing where it has no programs."""
    found = [row for row in content["cases"] if "phase" in row]
    if not found:
        return ""
    workers = "one worker" if content["workers"] == 1 else f"{content['workers']} workers"
    peers = list(dict.fromkeys(row["peer"] for row in found))
    rounds = max(row["rounds"] for row in found)
    text = (
        f"\n### {content['machine']} ({content['date']})\n\n"
        "Seconds of the first run / the later runs; the same for ratios and their mean "
        f"(of that many programs). Each cluster has {workers}, in {plural(rounds, 'round')}:\n\n"
        f"| program | {OURS} | {' | '.join(f'{peer} | ratio' for peer in peers)} |\n"
        f"|---|---|{'---|---|' * len(peers)}\n"
    )
    by_program: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in found:
        by_program.setdefault(row["case"], {})[row["peer"], row["phase"]] = row
    for program, those in by_program.items():
        one = next(iter(those.values()))
        size = next((f", {run['GB']:.3g} GB" for run in runs_of(one) if "GB" in run), "")
        of = {peer: cells([those.get((peer, phase)) for phase in PHASES]) for peer in peers}
        text += (
            f"| `{program}`: {one['what']}{size} | {next(iter(of.values()))[0]} | "
            + " | ".join(f"{theirs} | {ratio}" for _, theirs, ratio in of.values())
            + " |\n"
        )
    means = {(peer, phase): (mean, count) for peer, phase, mean, count in summary(found)}
    text += "| **geometric mean** | |"
    for peer in peers:
        told = [means[peer, phase] for phase in PHASES if (peer, phase) in means]
        text += f" | {'/'.join(f'**{mean:.2f}**' for mean, _ in told)}"
        text += f" (of {'/'.join(str(count) for _, count in told)}) |" if told else " |"
    text += "\n"
    failures = dict.fromkeys(
        f"- `{row['case']}` fails on {name}: `{row[who]}`\n"
        for row in found
        for who, name in (("ours_failed", OURS), ("theirs_failed", row["peer"]))
        if who in row
    )
    text += "\n" * bool(failures) + "".join(failures)
    there = {row["case"] for row in found}
    absent: dict[str, list[str]] = {}
    for name, why in content.get("left_out", {}).items():
        if name not in there:
            absent.setdefault(why, []).append(f"`{name}`")
    return text + "".join(
        f"\nLeft out: {', '.join(names)} ({why}).\n" for why, names in absent.items()
    )


def runs_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What all processes of a row told."""
    return [result for pair in row["pairs"] for result in pair.values()]


def cells(rows: Sequence[dict[str, Any] | None]) -> tuple[str, str, str]:
    """Ours, theirs and the ratio of both phases."""

    def both(texts: Sequence[str]) -> str:
        return "/".join(texts) if any(texts) else ""

    def took(row: dict[str, Any], who: str) -> str:
        if (seconds := row[f"{who}_s"]) is not None:
            return f"{seconds:.3g}"
        return "fails" if f"{who}_failed" in row else "-"

    there = [row for row in rows if row is not None]
    ours, theirs = (both([took(row, who) for row in there]) for who in ("ours", "theirs"))
    ratios = []
    for row in there:
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else "-"
        if "ratio" in row and row["rounds"] > 1:
            ratio += f" ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})"
        ratios.append(ratio)
    return ours, theirs, both(ratios)


def plural(number: int, word: str) -> str:
    """A number of things."""
    return f"{number} {word}{'s' * (number != 1)}"
