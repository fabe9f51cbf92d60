"""Two runs side by side: what got slower, and what cannot be compared."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest

from hpcdask.bench.command import main
from hpcdask.bench.measurement import Exchange, Measurement, Pair
from hpcdask.workloads import Check

WRONG = (Check("mean", 1, 2, 0),)


def line(workload="array", seconds=(0.9, 1.0, 1.1), **more):
    return Measurement(
        **{
            "workload": workload,
            "form": "tuned",
            "shape": (1000, 1000),
            "dtype": "float64",
            "devices": {"cpu": 3},
            "workers": 3,
            "checks": (Check("mean", 1, 1, 0),),
            "versions": {"dask": "1", "cupy": None},
            **more,
        },
        seconds=tuple(seconds),
    )


def exchanged(pair=1.0, latency=1.0, every=1.0, times=(1.0, 1.1)):
    """An exchange between three workers, with one of its times so many times the usual."""
    pairs = [
        Pair(i, j, "ucx", *(tuple(factor * one for one in times) for factor in factors))
        for i in range(3)
        for j in range(3)
        if i != j
        for factors in [(pair if (i, j) == (0, 2) else 1.0, latency)]
    ]
    found = Exchange(("a", "b", "c"), ("n", "n", "n"), 1000, tuple(pairs), 10)
    return line("exchange", exchange=found, seconds=tuple(every * one for one in times))


@pytest.fixture
def compare(tmp_path, capsys):
    """Compare files of measurements by the command: the exit code, and name and verdict by row."""

    def run(before, after):
        paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
        for path, found in zip(paths, (before, after), strict=True):
            with open(path, "w") as file:  # with an empty line
                file.write("\n".join([*(json.dumps(one.to_json()) for one in found), "", ""]))
        code = main(["--compare", *paths])
        rows = re.findall(r"^(.*?)  .*? ((?:only )?[a-z]+) *$", capsys.readouterr().out, re.M)
        return code, rows[1:]

    return run


def verdicts(told):
    return told[0], [verdict for _, verdict in told[1]]


def test_a_measurement_survives_json():
    found = replace(exchanged(), checks=WRONG, rates={"memory": 1.0}, gpus=None, k=10)
    assert Measurement.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((1.2, 1.3, 1.4), "slower"),
        ((0.9, 1.3, 1.4), "same"),  # the fastest run is as fast
        ((0.5, 0.6, 0.95), "faster"),
        ((0.5, 1.0, 1.1), "same"),
        ((1.0, 1.08, 1.2), "same"),
    ],
)
def test_verdicts(compare, after, verdict):
    there, back = [line()], [line(seconds=after)]
    assert verdicts(compare(there, back)) == (int(verdict == "slower"), [verdict])
    swapped = {"slower": "faster", "faster": "slower", "same": "same"}[verdict]
    assert verdicts(compare(back, there)) == (int(swapped == "slower"), [swapped])


def test_what_the_times_cannot_tell_is_no_regression(compare):
    """Regression: on a busy machine, any two runs had a regression."""
    assert verdicts(compare([line()], [line(seconds=(1.2, 1.9, 2.6))])) == (0, ["unclear"])


def a_run(seed, start=1.0, pair=1.0, array=1.0):
    """A run of the bench, whose times scatter by 3 %, with regressions."""
    scatter = random.Random(seed)
    times = [tuple(scatter.uniform(0.97, 1.03) for _ in range(3)) for _ in range(2)]
    return [
        line("startup", [start * scatter.uniform(0.97, 1.03)]),
        line(seconds=[array * one for one in times[0]]),
        exchanged(pair, times=times[1]),
    ]


@pytest.mark.parametrize(
    ("planted", "where"), [("start", "startup"), ("pair", "a -> c"), ("array", "array")]
)
@pytest.mark.parametrize("seed", range(5))
def test_30_percent_are_found_and_noise_is_not(compare, seed, planted, where):
    before = a_run(seed)
    assert compare(before, a_run(seed + 10))[0] == 0
    code, rows = compare(before, a_run(seed + 10, **{planted: 1.3}))
    slower = [name for name, verdict in rows if verdict == "slower"]
    assert (code, len(slower)) == (1, 1)
    assert where in slower[0]


def test_all_times_of_equal_measurements_count(compare):
    """Regression: the last of several lines was compared alone."""
    before = [line("startup", [s]) for s in (1.0, 1.01, 1.02)]
    after = [line("startup", [s]) for s in (1.2, 1.19, 1.21)]
    assert verdicts(compare(before, after)) == (1, ["slower"])


@pytest.mark.parametrize(
    "other",
    [
        {"form": "stock"},
        {"variant": "fft"},
        {"shape": (10, 10)},
        {"dtype": "uint8"},
        {"k": 5},
        {"chunk_nbytes": 10**6},
        {"block_nbytes": 10**6},
        {"devices": {"cpu": 4}},
        {"workers": 4},
    ],
)
def test_what_differs_is_not_compared(compare, other):
    """Regression: other numbers of values, chunks and blocks were compared."""
    code, rows = compare([line(), line("svd")], [line(**other), line("svd")])
    assert (code, [row[1] for row in rows]) == (0, ["only before", "same", "only after"])
    assert rows[0][0] != rows[2][0]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"pair": 1.3}, "a -> c"),
        ({"latency": 1.6}, "8 bytes"),
    ],
)
def test_slower_transfers_are_seen(compare, part, name):
    """Regression: only the exchange's own time was compared."""
    code, (whole, change) = compare([exchanged()], [exchanged(**part)])
    assert (code, whole[1], change) == (1, "same", (f"exchange: {name}", "slower"))


def test_8_bytes_may_take_half_a_millisecond_more(compare):
    times = {"times": (2e-4, 2.1e-4)}
    assert compare([exchanged(**times)], [exchanged(latency=3.4, **times)])[0] == 0
    assert compare([exchanged(**times)], [exchanged(latency=3.6, **times)])[0] == 1


def test_a_slower_exchange_of_all_is_seen(compare):
    assert verdicts(compare([exchanged()], [exchanged(every=1.3)])) == (1, ["slower"])
    assert verdicts(compare([exchanged()], [exchanged(every=1.15)])) == (0, ["same"])


def test_a_wrong_result_counts_also_where_only_the_run_after_has_it(compare):
    old, wrong = line("svd"), replace(line(seconds=[0.1]), checks=WRONG)
    assert verdicts(compare([old], [old, wrong])) == (1, ["same", "wrong"])
    assert verdicts(compare([old, line()], [wrong])) == (1, ["only before", "wrong"])
    assert verdicts(compare([old, wrong], [old])) == (0, ["same", "only before"])


def test_the_table_and_what_else_changed(compare, capsys, monkeypatch):
    rates = {"memory": 3.9e12, "random": 2e11}
    less = {"memory": 2e12, "random": 2.01e11}
    slower = line(seconds=(2.0, 2.1, 2.2), versions={"dask": "2", "cupy": None}, rates=less)
    printed = []
    read = capsys.readouterr
    monkeypatch.setattr(capsys, "readouterr", lambda: printed.append(read()) or printed[-1])
    compare([line(rates=rates), line("fft")], [line("svd", versions={"dask": "2"}), slower])
    assert [" ".join(row.split()) for row in printed[0].out.splitlines()[1:]] == [
        "array, tuned 7.63 MiB on 3 x cpu 1 s (0.9 to 1.1) 2.1 s (2 to 2.2) 2.100 slower",
        "fft, tuned 7.63 MiB on 3 x cpu 1 s (0.9 to 1.1) - - only before",
        "svd, tuned 7.63 MiB on 3 x cpu - 1 s (0.9 to 1.1) - only after",
        "versions: dask 1 -> 2",
        "limits of the hardware: memory 3,900 GB/s -> 2,000 GB/s",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "x.json, result 1 is none that `hpcdask bench --json`"),
        (b'{"version": 0}', "its version is 0, not 1"),
        (b'{"version": 1, "workload": "array"}', "KeyError"),
        (b"\n\n", "no workload in common"),
        (b"\xff\xfe", "UnicodeDecodeError"),
        (json.dumps(line("svd").to_json()).encode(), "no workload in common"),
    ],
)
def test_a_file_that_is_none(tmp_path, capsys, text, message):
    path, good = tmp_path / "x.json", tmp_path / "good.json"
    path.write_bytes(text)
    good.write_text(json.dumps(line().to_json()))
    assert main(["--compare", str(path), str(good)]) == 2
    assert message in capsys.readouterr().err
