"""Two runs side by side: what got slower, and what cannot be compared."""

from __future__ import annotations

import json

import pytest

from hpcdask.bench import compare
from hpcdask.errors import UsageError


def line(workload="array", times=(0.9, 1.0, 1.1), **more):
    """A record with least, median and greatest time."""
    least, median, greatest = times
    return {
        "workload": workload,
        "form": "tuned",
        "shape": [1000, 1000],
        "dtype": "float64",
        "bytes": 8_000_000,
        "seconds_min": least,
        "seconds_median": median,
        "seconds_max": greatest,
        "devices": {"cpu": 2},
        "workers": 2,
        "checks": [{"name": "mean", "ok": True}],
        "versions": {"dask": "1", "cupy": None},
        **more,
    }


def write(path, *records):
    """A file of the bench, with an empty line."""
    path.write_text("\n".join([*map(json.dumps, records), "", ""]))
    return path


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((1.2, 1.3, 1.4), "slower"),
        ((1.05, 1.3, 1.4), "same"),  # the ranges overlap
        ((0.5, 0.6, 0.7), "faster"),
        ((0.5, 0.6, 0.95), "same"),
        ((0.9, 1.0, 1.1), "same"),
    ],
)
def test_verdicts(after, verdict):
    (change,) = compare.compare([line()], [line(times=after)])
    assert change.verdict == verdict
    assert change.ratio == pytest.approx(after[1])
    assert compare.exit_code([change]) == (verdict == "slower")
    swapped = {"slower": "faster", "faster": "slower", "same": "same"}[verdict]
    assert compare.compare([line(times=after)], [line()])[0].verdict == swapped


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1)])
def test_one_run_tells_nothing(before, after):
    """Least and greatest of start-up are over workers, and do not tell how launches differ."""
    old, new = line(seconds=[1.0] * before), line(times=(3, 3, 3), seconds=[3.0] * after)
    (change,) = compare.compare([old], [new])
    assert change.verdict == "one run"
    assert compare.exit_code([change]) == 0
    new["checks"] = [{"name": "mean", "ok": False}]
    assert compare.compare([old], [new])[0].verdict == "wrong"
    assert compare.compare([line(seconds=[1.0] * 2)], [line(times=(3, 3, 3), seconds=[3.0] * 2)])[
        0
    ].verdict == ("slower")


def test_a_little_slower_is_the_same():
    single = [line(times=(1.0, 1.0, 1.0))]
    assert compare.compare(single, [line(times=(1.05, 1.05, 1.05))])[0].verdict == "same"
    assert compare.compare(single, [line(times=(1.06, 1.06, 1.06))])[0].verdict == "slower"


def test_the_last_of_several_lines_counts():
    slow, right = line(times=(9, 9, 9)), line()
    assert [change.verdict for change in compare.compare([slow, right], [slow, right])] == ["same"]


@pytest.mark.parametrize(
    "other",
    [
        {"form": "stock"},
        {"shape": [10, 10]},
        {"dtype": "uint8"},
        {"devices": {"cpu": 3}},
        {"workers": 3},
        {"label": "mine"},
    ],
)
def test_what_differs_is_not_compared(other):
    changes = compare.compare([line(), line("svd")], [line(**other), line("svd")])
    assert [change.verdict for change in changes] == ["only before", "same", "only after"]
    assert compare.exit_code(changes) == 0
    assert changes[0].ratio is None


def test_files_and_the_table(tmp_path, capsys):
    limits = {"workload": "limits", "rates": {"memory": 3.9e12, "random": 2e11}}
    before = write(tmp_path / "a.json", limits, line(), line("fft"))
    less = {"memory": 2e12, "random": 2.01e11}
    slower = line(times=(2.0, 2.1, 2.2), versions={"dask": "2", "cupy": None}, rates=less)
    after = write(tmp_path / "b.json", slower, line("svd"))
    assert compare.compare_files(before, after) == 1
    assert [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()[1:]] == [
        "array tuned 8.0 MB on 2 x cpu 1 s (0.9 to 1.1) 2.1 s (2 to 2.2) 2.100 slower",
        "fft tuned 8.0 MB on 2 x cpu 1 s (0.9 to 1.1) - - only before",
        "svd tuned 8.0 MB on 2 x cpu - 1 s (0.9 to 1.1) - only after",
        "versions: dask 1 -> 2",
        "limits of the hardware, per second: memory 3.9e+12 -> 2e+12",
    ]
    assert compare.compare_files(before, before) == 0
    assert "versions" not in capsys.readouterr().out


def test_nothing_in_common():
    with pytest.raises(UsageError, match=r"before there are fft tuned 8.0 MB on 2 x cpu; after, a"):
        compare.compare([line("fft")], [line()])
    with pytest.raises(UsageError, match=r"after, none"):
        compare.compare([line()], [{"workload": "limits", "rates": {}}])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"line 1: not a result, it names no workload"),
        ("[1]", r"line 1: not a result"),
        ('{"workload": "limits", "rates": {}}\nhpcdask: 3 s', r"line 2: not JSON \(Expecting"),
        ('{"workload": "array"}', r"seconds_median is None, not a time in seconds"),
        (json.dumps(line(times=(0, "1", 1))), r"seconds_median is '1'"),
        (json.dumps(line(times=(float("nan"), 1, 1))), r"seconds_min is nan"),
        ("[" * 100_000, r"line 1: not JSON"),
        ("\n\n", r"is empty: `hpcdask bench all --json"),
        (b"\xff\xfe", r"cannot be read: UnicodeDecodeError"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=message) as caught:
        compare.load(path)
    assert str(path) in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(UsageError, match=r"none.json cannot be read: FileNotFoundError"):
        compare.load(tmp_path / "none.json")
