"""How cases on hpcdask and its peers are told, with processes that only print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = "transpose_sum.py"
SLEEPS = "import subprocess, sys; subprocess.run(['sleep', '600'], start_new_session=True)"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import peers

    return peers


def prints(*lines: dict, then: str = "") -> str:
    """A program that prints these lines."""
    return "".join(f"print({json.dumps(line)!r}); " for line in lines) + (then or "pass")


def seconds(*values: float, correct: bool = True) -> list[dict]:
    return [{"seconds": value, "correct": correct, "GB": 20} for value in values]


def measure(peers: ModuleType, codes: dict[str, str], **keywords) -> tuple[list, str]:
    """The records that codes of two sides lead to, and why the case was left out."""
    sides = [peers.Side(name, [sys.executable, "-S", "-c", code]) for name, code in codes.items()]
    case = peers.program_case(PROGRAM, sides, [], 60)
    *_, (_, found, why) = peers.measure([case], **keywords)
    return found, why


def section(peers: ModuleType, found: list, left_out: dict[str, str] | None = None) -> str:
    cases = [peers.asdict(one) for one in found]
    return peers.section([{"cases": cases, "left_out": left_out or {}}])


def test_first_runs_apart_from_later_ones(peers: ModuleType):
    codes = {"hpcdask": prints(*seconds(3, 1, 1)), "A": prints(*seconds(2, 2, 4))}
    (found,), _ = measure(peers, codes, rounds=3)
    assert (found.seconds("ours", "first"), found.seconds("theirs", "first")) == (3, 2)
    assert (found.seconds("ours", "later"), found.seconds("theirs", "later")) == (1, 3)
    assert found.ratios("first") == [1.5] * 3
    text = section(peers, [found])
    assert "| A | 2/3 | **1.500** (1.500-1.500)/0.333 (0.333-0.333) | 3 |" in text
    assert "hpcdask is slower in 1 of 2 comparisons." in text
    assert "A, first: 1.50, the geometric mean of 1." in text
    assert "A, later: 0.33, the geometric mean of 1." in text


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ValueError('no such chunk')", "ValueError: no such chunk"),
        (prints(*seconds(1), then="raise SystemExit(3)"), "exit code 3"),
        (prints(*seconds(1, 1, correct=False)), "a result is wrong"),
    ],
)
def test_a_program_that_fails_is_told(peers: ModuleType, code: str, why: str):
    codes = {"hpcdask": prints(*seconds(3, 1)), "A": code}
    (found,), _ = measure(peers, codes, rounds=2)
    assert found.failure("theirs") == why
    assert not found.failure("ours")
    text = section(peers, [found], dict.fromkeys(["actor.py", "fft.py"], "the time was over"))
    assert f"| `{PROGRAM}`: `x + x.T`, 20 GB | 3/1 | " in text
    assert "fails | " in text
    assert f"\n- `{PROGRAM}` fails on A: `{why}`\n" in text
    assert text.endswith("\nLeft out: `actor.py`, `fft.py` (the time was over).\n")


def test_runs_without_time_are_no_failure(peers: ModuleType):
    codes = {"hpcdask": prints(*seconds(3, 1)), "A": prints(*seconds(6))}
    found, _ = measure(peers, codes, rounds=1)
    text = section(peers, found)
    assert "20 GB | 3/1 | A | 6/- | 0.500/- | 1 |\n" in text
    assert "fails" not in text


def test_the_results_are_a_file_of_this_machine(tmp_path: Path):
    """Regression: without a GPU the program ended before its first case."""
    path = tmp_path / "results.json"
    words = ["--cases", "programs", "--programs", PROGRAM, "--budget", "0", "--json", str(path)]
    command = [sys.executable, str(BENCHMARKS / "peers.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert "CPU cores" in results["machine"]
    assert results["left_out"] == {PROGRAM: "the time was over"}


def test_a_program_that_is_not_over_fails(peers: ModuleType):
    side = peers.Side("A", [sys.executable, "-S", "-c", SLEEPS])
    assert peers.run(peers.Case("c", [side]), side, 1)["failed"] == "not over after 1 s"


def test_a_missing_package_leaves_a_program_out(peers: ModuleType):
    codes = {"hpcdask": prints({"skipped": "sklearn not installed"}), "A": prints(*seconds(1))}
    assert measure(peers, codes) == ([], "sklearn not installed")


def test_every_program_is_run_and_says_what_it_does(peers: ModuleType):
    there = {path.name for path in (BENCHMARKS / "programs").glob("*.py")} - {"common.py"}
    assert {program.split()[0] for program in peers.PROGRAMS} == there
    assert all(peers.program_case(one, [], [], 1).what for one in peers.PROGRAMS)


def test_the_page_has_what_was_measured(peers: ModuleType):
    """Results of programs on an H100 were there for a while, and not on the page."""
    assert peers.PAGE.read_text() == peers.page([*(BENCHMARKS / "results").glob("*.json")])
