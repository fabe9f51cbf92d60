"""How programs on hpcdask and its peers are told, with processes that only print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAM = "transpose_sum.py"
SLEEPS = "import subprocess, sys; subprocess.run(['sleep', '600'], start_new_session=True)"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import user_programs

    return user_programs


def prints(*lines: dict, then: str = "") -> str:
    """A program that prints these lines."""
    return "".join(f"print({json.dumps(line)!r}); " for line in lines) + (then or "pass")


def seconds(*values: float, correct: bool = True) -> list[dict]:
    return [{"seconds": value, "correct": correct, "GB": 20} for value in values]


def rows_of(programs: ModuleType, clusters: dict[str, str], **keywords) -> tuple[list, list]:
    """The rows that codes of clusters lead to, and the rounds."""
    on = [
        programs.Cluster(name, [sys.executable, "-S", "-c", code], {})
        for name, code in clusters.items()
    ]
    *_, (program, rounds) = programs.measure(on, [PROGRAM], [], **keywords)
    return programs.rows(program, rounds, [*clusters][1:]), rounds


def test_first_runs_apart_from_later_ones(programs: ModuleType):
    codes = {"hpcdask": prints(*seconds(3, 1, 1)), "A": prints(*seconds(2, 2, 4))}
    (first, later), _ = rows_of(programs, codes, rounds=3)
    assert (first["phase"], first["ours_s"], first["theirs_s"]) == ("first", 3, 2)
    assert first["ratio"] == 1.5
    assert (later["phase"], later["ours_s"], later["theirs_s"]) == ("later", 1, 3)
    assert first["rounds"] == len(first["pairs"]) == 3
    means = {phase: mean for _, phase, mean, _ in programs.summary([first, later])}
    assert means == pytest.approx({"first": 1.5, "later": 1 / 3})


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ValueError('no such chunk')", "ValueError: no such chunk"),
        (prints(*seconds(1), then="raise SystemExit(3)"), "exit code 3"),
        (prints(*seconds(1, 1, correct=False)), "a result is wrong"),
    ],
)
def test_a_program_that_fails_is_a_row(programs: ModuleType, code: str, why: str):
    codes = {"hpcdask": prints(*seconds(3, 1)), "A": code}
    found, _ = rows_of(programs, codes, rounds=2)
    assert [row.get("ratio") for row in found] == [3 if "SystemExit" in code else None, None]
    assert {row["theirs_failed"] for row in found} == {why}
    content = {"machine": "M", "date": "D", "workers": 2, "cases": found}
    content["left_out"] = dict.fromkeys(["actor.py", "fft.py"], "the time was over")
    text = programs.tables(content)
    assert f"| `{PROGRAM}`: `x + x.T`, 20 GB | 3/1 | " in text
    assert "/fails | " in text
    assert f"\n- `{PROGRAM}` fails on A: `{why}`\n" in text
    assert text.endswith("\nLeft out: `actor.py`, `fft.py` (the time was over).\n")


def test_runs_without_time_are_no_failure(programs: ModuleType):
    codes = {"hpcdask": prints(*seconds(3, 1)), "A": prints(*seconds(6))}
    found, _ = rows_of(programs, codes, rounds=1)
    text = programs.tables({"machine": "M", "date": "D", "workers": 2, "cases": found})
    assert "20 GB | 3/1 | 6/- | 0.50/- |\n" in text
    assert "fails" not in text


def test_nothing_of_a_command_stays(programs: ModuleType):
    from launches import MARK, execute, marked

    code = f"import os; print(os.environ['{MARK}'], flush=True); {SLEEPS}"
    ended = execute([sys.executable, "-S", "-c", code], {}, 1.5)
    assert ended.code is None
    assert marked(ended.out.strip()) == []


def test_a_program_that_is_not_over_fails(programs: ModuleType):
    cluster = programs.Cluster("A", [sys.executable, "-S", "-c", SLEEPS], {})
    assert programs.run(cluster, PROGRAM, [], 1)["failed"] == "not over after 1 s"


def test_a_budget_leaves_programs_out(programs: ModuleType):
    codes = {"hpcdask": prints(*seconds(1)), "A": SLEEPS}
    found, rounds = rows_of(programs, codes, budget_s=3)
    assert found == []
    assert rounds[-1].skipped == "the time was over"


def test_a_missing_package_leaves_a_program_out(programs: ModuleType):
    codes = {"hpcdask": prints({"skipped": "sklearn not installed"}), "A": prints(*seconds(1))}
    found, rounds = rows_of(programs, codes)
    assert (found, len(rounds), rounds[0].skipped) == ([], 1, "sklearn not installed")


def test_every_program_is_run_and_says_what_it_does(programs: ModuleType):
    there = {path.name for path in (BENCHMARKS / "programs").glob("*.py")} - {"common.py"}
    assert {program.split()[0] for program in programs.PROGRAMS} == there
    assert all(programs.title(program) for program in programs.PROGRAMS)


def test_the_page_has_what_was_measured(programs: ModuleType):
    """Results of programs on an H100 were there for a while, and not on the page."""
    import peers

    assert peers.PAGE.read_text() == peers.page([*(BENCHMARKS / "results").glob("*.json")])


def test_laid_out_workloads_have_a_table_of_their_own(programs: ModuleType):
    """Beside rows of the same program they looked like the same comparison."""
    import peers

    pair = {who: {"seconds": [1.0, 2.0]} for who in ("ours", "theirs")}
    cases = [
        peers.summarise(name, peer, "seconds", [pair])
        for name, peer in (
            ("startup to 2 workers", "LocalCluster"),
            (f"SVD 1 GB{peers.FORMS}", f"LocalCluster{peers.STOCK}"),
        )
    ]
    content = {"machine": "m", "date": "2026-11-21", "versions": {"hpcdask": "7.8"}, "cases": cases}
    _, same, laid_out = peers.section(content).split("\n\n")
    assert same.startswith("| The same program on both | hpcdask 7.8, s |")
    assert "| startup to 2 workers | 1.5 | 1.5 (LocalCluster) | 1.000 | 1 |" in same
    assert laid_out.startswith("| Laid-out workloads, tuned form against stock form |")
    assert "| SVD 1 GB | 1.5 | 1.5 (LocalCluster) |" in laid_out
