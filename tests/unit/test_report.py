"""The page: what is on it, what is not, and that it needs nothing but itself."""

from __future__ import annotations

import copy
import json
import logging
import re
from html.parser import HTMLParser

import pytest

import browser
from hpcdask.bench import charts, report
from hpcdask.errors import UsageError

SECTIONS = ("Times", "Published figures", "Exchange between workers", "Where the time goes")
NASTY = "<img src=x onerror=alert(1)> </script> $$x^2$$ 'q' \"r\" &amp; \\[y\\]"


def record(workload="array", form="tuned", median=1.0, **more):
    """What the bench writes."""
    return {
        "workload": workload,
        "form": form,
        "shape": [500_000, 500_000],
        "dtype": "float64",
        "bytes": 2 * 10**12,
        "seconds": [0.9 * median, median, 1.2 * median],
        "seconds_median": median,
        "seconds_min": 0.9 * median,
        "seconds_max": 1.2 * median,
        "GB/s": 2000 / median,
        "dask_tasks": 5861,
        "devices": {"NVIDIA H200": 8},
        "workers": 8,
        "threads": 8,
        "result": {},
        "checks": [{"name": "mean", "value": 11.0, "expected": 11.0, "tolerance": 0.1, "ok": True}],
        "versions": {"dask": "2026.7.1", "cupy": None},
        "date": "2026-11-22T10:11:12+00:00",
        **more,
    }


def limit(seconds, fraction, by="memory"):
    """A limit as in a record."""
    return {"seconds": seconds, "by": by, "fraction": fraction, "parts": {by: seconds}}


EXCHANGE = record(
    "exchange",
    "stock",
    0.05,
    result={
        "names": ["gpu1-0", "gpu1-1"],
        "hosts": ["gpu1", "gpu1"],
        "pair_bytes": 256_000_000,
        "GB/s": [[None, 190.0], [20.0, None]],
        "transport": [[None, "ucx"], ["ucx", None]],
        "slow": [{"kind": "pair", "who": ["gpu1-1", "gpu1-0"], "text": "gpu1-1 to gpu1-0: slow"}],
    },
)
PUBLISHED = [
    {"what": "8 V100, Dask blog 2019", "seconds": 19.0, "bytes": 2e12},
    {"what": "half of it", "seconds": 5.0, "bytes": 1e12},
]
PHASES = [{"name": "imports", "seconds": 0.5}, {"name": "CUDA context", "seconds": 1.1}]


def timeline(n_workers=2, n_threads=1):
    """A timeline as in a record."""
    entries = [
        {
            "worker": f"w{worker}",
            "thread": thread,
            "start": 0.1 * step,
            "stop": 0.1 * step + 0.09,
            "name": f"name{step}",
            "action": "transfer" if step == 9 else "compute",
        }
        for worker in range(n_workers)
        for thread in range(n_threads)
        for step in range(10)
    ]
    return {"entries": entries, "left_out": 1234}


def gpus(*unknown):
    """What two GPUs did, as in a record; these figures are not known."""
    moment = {"utilisation": 50, "memory": 2**34, "power": 350.0, "nvlink": 1e9}
    moment |= dict.fromkeys(unknown)
    return {
        "usage": {"problems": ["idle: n1 GPU <1>"]},
        "line": "2 x H100, 0.01 GPU hours",
        "series": {f"n1 GPU {i}": [{"time": t, **moment} for t in range(3)] for i in range(2)},
    }


STARTUP = {
    key: value
    for key, value in record("startup", "hpcdask", 1.6, phases=PHASES).items()
    if key not in ("bytes", "shape", "dtype", "GB/s", "dask_tasks")
}
ALL = [
    {"workload": "limits", "rates": {"memory": 3.1e13, "matrix_float64": 4.2e11}},
    record(limit=limit(0.6, 0.6, "random"), published=PUBLISHED),
    record("svd", limit=limit(0.5, 0.5), timeline=timeline(), gpus=gpus()),
    EXCHANGE,
    STARTUP,
]


class Page(HTMLParser):
    """Tags with their attributes, and all text outside scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def whole():
    return report.html(ALL)


# --- what is on it --------------------------------------------------------------------------------


def test_it_loads_nothing(whole):
    tags = Page(whole).tags
    assert sum(tag == "script" for tag, _ in tags) >= 2
    for tag, attributes in tags:
        assert tag not in ("link", "iframe", "object", "base", "img")
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "data")
            assert name != "href" or value.startswith("#")
    style = re.search(r"<style>(.*?)</style>", whole, re.DOTALL)[1]
    assert "url(" not in style
    assert "@import" not in style
    assert len(whole) < 2_000_000


def test_everything_is_told(whole):
    text = Page(whole).text
    for what in (*SECTIONS, "Timeline of svd tuned"):
        assert what in text
    for what in (
        "hpcdask bench: 8 x NVIDIA H200",
        "8 workers, 8 threads",
        "measured 2026-11-22 10:11:12 UTC",
        "dask 2026.7.1",
        "31 TB/s",
        "420 GFLOP/s",
        "500,000 x 500,000 float64",
        "0.9 s to 1.2 s (3)",
        "60 % of generator speed",
        "50 % of memory speed",
        "5,861",
        "1 passed",
        "8 V100, Dask blog 2019",
        "10 s, scaled from 1.0 TB",
        "gpu1-1 to gpu1-0: slow",
        "imports",
        "The 20 longest are shown, 1,234 shorter ones left out",
        "3 other names",
        "transfer",
    ):
        assert what in text
    assert "cupy" not in text
    assert "wrong" not in text
    assert "None" not in text


@pytest.mark.parametrize(
    ("records", "sections"),
    [
        ([record()], ["Times"]),
        ([record(published=PUBLISHED)], ["Times", "Published figures"]),
        ([EXCHANGE], ["What to look at", "Times", "Exchange between workers"]),
        ([STARTUP], ["Times", "Where the time goes"]),
        ([record(timeline=timeline())], ["Times", "Timeline of array tuned"]),
        ([record(timeline={"entries": [], "left_out": 0})], ["Times"]),
        ([ALL[0]], []),
        ([{"workload": "startup", "phases": PHASES}], ["Where the time goes"]),
    ],
)
def test_sections_without_data_are_left_out(records, sections):
    page = report.html(records)
    assert re.findall(r"<h2>(.*?)</h2>", page) == sections
    assert ("<script" in page) == bool(sections)
    assert ("class='rates'" in page) == (records == [ALL[0]])


def test_the_verdict_names_the_nearest_and_what_is_far():
    slow = [
        record(form="stock", limit=limit(0.1, 0.1), timeline=timeline()),
        record("svd", limit=limit(0.9, 0.9, "link")),
    ]
    page = Page(report.html([*slow, EXCHANGE])).text
    assert "1 of 2 workloads reaches half of what this hardware allows, or more." in page
    assert "Nearest is svd tuned, at 90 % of exchange speed." in page
    assert "array stock runs at 10 % of memory speed: see its timeline" in page
    assert page.index("gpu1-1 to gpu1-0: slow") < page.index("array stock runs at")
    alone = Page(report.html([slow[1]])).text
    assert "svd tuned runs at 90 % of exchange speed." in alone
    assert "No check failed, and nothing stands out." in alone


@pytest.mark.parametrize(
    ("n", "told"),
    [
        (1, "8 workers, 8 threads on n0 over tcp with TLS"),
        (2, "8 workers, 8 threads on n0, n1 over tcp with TLS"),
        (5, "8 workers, 8 threads on n0, n1, n2, n3 and 1 more over tcp with TLS"),
        (99, "8 workers, 8 threads on n0, n1, n2, n3 and 95 more over tcp with TLS"),
    ],
)
def test_hosts_and_protocol_are_named(n, told):
    hosts = [f"n{i}" for i in range(n)]
    assert told in Page(report.html([record(hosts=hosts, protocols=["tls"])])).text
    both = Page(report.html([record(hosts=hosts, protocols=["tls", "ucx"])])).text
    assert f"{told} and ucx between workers" in both


def test_forms_have_their_own_colours():
    legend = charts.times([record(), record(form="stock")], ["a", "b"]).legend
    assert [mark.colour for mark in legend] == [charts.GREEN, charts.BLUE, charts.FAINT]
    assert "Dask's documentation" in legend[0].meaning


def test_rates_of_several_clusters_are_nobody_s():
    """Those of the last row of a table stood above all."""
    one, other = {"memory": 2e10}, {"memory": 4e10}
    rows = [{**ALL[1], "rates": rates} for rates in (one, one, other)]
    assert "class='rates'" in report.html(rows[:2])
    assert "class='rates'" not in report.html(rows)


def test_charts_keep_their_labels_on_a_narrow_page():
    page = report.html([ALL[1]])
    assert '"min_width":720' in page
    assert re.search(r"<div class='wide drawn'>\s*<div id=", page)


def test_failed_checks_stand_out():
    wrong = record("svd")
    wrong["checks"] += [
        {"name": "first value", "value": 3.0, "expected": 4.0, "tolerance": 0.5, "ok": False}
    ]
    page = report.html([record(), wrong])
    assert "<h2>A result is wrong</h2>" in page
    assert "<b>svd tuned</b>: first value is 3.0, expected 4.0 within 0.5" in page
    assert "<td class='bad'>1 of 2 failed</td>" in page
    assert "<td class='bad'>svd tuned</td>" in page
    assert "a check failed: the result is wrong" in page
    wrong["checks"][0] = {**wrong["checks"][1], "name": "second value"}
    assert "<h2>2 checks failed</h2>" in report.html([wrong])


def test_records_are_named_by_what_differs():
    small, other = record(bytes=10**9), record(bytes=10**9, devices={"cpu": 2})
    text = Page(report.html([record(), small, other, record(label="mine")])).text
    for name in ("tuned, 2.0 TB", "tuned, 1.0 GB, 8 x NVIDIA H200", "tuned, 1.0 GB, 2 x cpu"):
        assert f"array {name}" in text
    assert "mine" in text


def test_everything_is_escaped(whole):
    nasty = copy.deepcopy(ALL)
    for one in nasty[1:]:
        one.update(
            label=NASTY, devices={NASTY: 1}, versions={NASTY: NASTY}, date=NASTY, dtype=NASTY
        )
        one["checks"] = [
            {"name": NASTY, "value": NASTY, "expected": NASTY, "tolerance": NASTY, "ok": False}
        ]
    nasty[0]["rates"][NASTY] = 1.0
    nasty[1]["published"][0]["what"] = nasty[1]["limit"]["by"] = NASTY
    nasty[2]["timeline"]["entries"][0].update(worker=NASTY, name=NASTY)
    nasty[2]["timeline"]["entries"][1]["action"] = NASTY
    nasty[3]["result"].update(names=[NASTY, "b"], hosts=[NASTY, NASTY])
    nasty[3]["result"]["slow"] = [{"kind": "pair", "who": [NASTY, "b"], "text": NASTY}]
    nasty[4]["phases"][0]["name"] = NASTY
    page = report.html(nasty)
    assert "<img" not in page
    assert not any(tag == "img" for tag, _ in Page(page).tags)
    assert page.count("</script>") == whole.count("</script>")
    assert Page(page).text.count("onerror=alert") > 10


def test_tex_is_no_tex():
    # Bokeh takes these for formulas, and fetches what can draw them.
    for delimiters in ("$$x$$", r"\[x\]", r"\(x\)"):
        text = charts.plain(f"a {delimiters} b")
        assert not re.search(r"\$\$|\\[\[\]()]", text)
        assert text.replace("\u200b", "") == f"a {delimiters} b"
    assert charts.plain("a $5 b\\c") == "a $5 b\\c"


# --- files ----------------------------------------------------------------------------------------


def test_write(tmp_path):
    path = tmp_path / "x.html"
    report.write([record()], path)
    assert path.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(UsageError, match=r"no/x.html cannot be written: No such file"):
        report.write([record()], tmp_path / "no" / "x.html")
    with pytest.raises(UsageError, match="there is none"):
        report.html([])


# --- charts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9540, "159 min"),
        (599, "599 s"),
        (97, "97 s"),
        (0.3456, "0.346 s"),
        (0.0999, "99.9 ms"),
        (2.5e-5, "25 µs"),
        (0, "0 µs"),
    ],
)
def test_durations(seconds, text):
    assert charts.duration(seconds) == text


def test_published_figures_are_scaled_by_size():
    same, scaled = charts.published(record(published=PUBLISHED))
    assert (same["here"], same["scaled"]) == (19.0, "")
    assert (scaled["here"], scaled["scaled"]) == (10.0, "scaled from 1.0 TB")
    (unknown,) = charts.published(record(published=[{"what": "a", "seconds": 3}]))
    assert (unknown["here"], unknown["scaled"]) == (3, "")
    assert charts.published(record()) == []
    # A small array waits for other things than a large one.
    assert len(charts.published(record(published=PUBLISHED, bytes=2 * 10**10))) == 2
    assert charts.published(record(published=PUBLISHED, bytes=10**9)) == []


@pytest.mark.parametrize("n", [1, 12])
@pytest.mark.parametrize("median", [1e-4, 1.0, 3000.0])
def test_all_marks_are_in_the_chart(n, median):
    records = [
        record(median=median * 1.5**i, limit=limit(median / 2, 0.5), published=PUBLISHED)
        for i in range(n)
    ]
    plot = charts.times(records, [f"r{i}" for i in range(n)]).figure
    low, high = plot.x_range.start, plot.x_range.end
    assert high >= 9.99 * low
    assert low < median / 2 < median * 1.5 ** (n - 1) * 1.2 < high
    assert low < 10.0
    assert high > 19.0
    assert 2 <= sum(low <= tick <= high for tick in plot.xaxis[0].ticker.ticks) <= 14


@pytest.mark.parametrize(("n_workers", "n_threads"), [(1, 1), (64, 1), (200, 1), (2, 3)])
def test_a_row_for_each_thread(n_workers, n_threads):
    chart = charts.timeline(timeline(n_workers, n_threads)["entries"])
    labels = chart.figure.yaxis[0].major_label_overrides
    assert chart.figure.height <= 1100
    assert labels[0] == ("w0, thread 0" if n_threads > 1 else "w0")
    last = n_workers * n_threads - 1
    assert chart.figure.y_range.start == pytest.approx(last + 0.7)
    if n_workers == 64:
        assert [labels[y] for y in sorted(labels)] == [f"w{i}" for i in range(64)]
    colours = [mark.colour for mark in chart.legend]
    assert len(set(colours)) == len(colours) == 8
    assert chart.legend[-1] == charts.Mark(charts.RED, "bar", "transfer")


def test_bokeh_has_no_complaints(caplog):
    with caplog.at_level(logging.WARNING):
        report.html(ALL)
    assert not caplog.records


# --- in a browser ---------------------------------------------------------------------------------

WATCH = """<script>
const errors = [];
addEventListener('error', e => errors.push(e.message));
console.error = (...all) => errors.push(all.join(' '));
addEventListener('load', () => setTimeout(() => {
  const told = document.createElement('pre');
  told.id = 'told';
  told.textContent = JSON.stringify({
    errors,
    roots: Bokeh.documents.flatMap(d => d.roots()).length,
    idle: Bokeh.documents.every(d => d.is_idle),
    loaded: performance.getEntriesByType('resource').map(e => e.name),
  });
  document.body.append(told);
}, 500));
</script>"""


def test_a_browser_draws_it_without_errors(tmp_path):
    nasty = record("fft", label=NASTY, phases=[{"name": NASTY, "seconds": 1.0}])
    page = tmp_path / "x.html"
    page.write_text(report.html([*ALL, nasty]).replace("<head>", f"<head>{WATCH}"))
    text = browser.run(tmp_path, "--virtual-time-budget=3000", "--dump-dom", page.as_uri())
    told = json.loads(re.search(r'<pre id="told">(.*?)</pre>', text, re.DOTALL)[1])
    assert told == {"errors": [], "roots": 4, "idle": True, "loaded": []}


def test_what_the_gpus_did_stands_below_the_timeline(whole):
    page = Page(whole)
    assert page.text.count("2 x H100, 0.01 GPU hours") == 1
    assert "idle: n1 GPU <1>" in page.text
    assert page.text.index("Timeline of") < page.text.index("2 x H100, 0.01 GPU hours")
    assert "power, W" in whole
    assert "n1 GPU 1" in page.text


def test_gpus_without_a_timeline_and_with_unknown_figures():
    page = report.html([record(gpus=gpus("power", "nvlink"))])
    assert "<h2>GPUs during" in page
    assert "utilisation, %" in page
    assert "power, W" not in page
    told = gpus()
    del told["series"]
    assert "2 x H100" in report.html([record(gpus=told)])
    assert "GPUs" not in report.html([record()])
