"""The page: what is on it, what is not, and that it needs nothing but itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import browser
from hpcdask.bench import report
from hpcdask.bench.measurement import Exchange, Measurement, Pair
from hpcdask.gpu.usage import RunUsage
from hpcdask.workloads import Check

NASTY = "<img src=x onerror=alert(1)> </script> 'q' \"r\" &amp;"

SECONDS = (0.9, 1.0, 1.2)

ONE = Measurement(
    workload="array",
    form="tuned",
    shape=(500_000, 500_000),
    dtype="float64",
    seconds=SECONDS,
    dask_tasks=5861,
    devices={"NVIDIA H200": 8},
    workers=8,
    threads=8,
    hosts=("n0",),
    processors=("Xeon Platinum",),
    protocols=("tls",),
    checks=(Check("mean", 11.0, 11.0, 0.1),),
    versions={"dask": "2026.7.1", "cupy": None},
    date="2026-11-22T10:11:12+00:00",
)

SVD = replace(ONE, workload="svd", k=10)


def limited(one, seconds, by="memory"):
    """A measurement with a limit of so many seconds."""
    return replace(one, work={by: 1e9 * seconds}, rates={by: 1e9})


def exchanged(names=("gpu1-0", "gpu1-1")):
    pairs = tuple(
        Pair(i, j, "ucx", (1.0 + i,), (1e-3,))
        for i in range(len(names))
        for j in range(len(names))
        if i != j
    )
    slow = ("gpu1-1 to gpu1-0: slow",)
    hosts = ("n0",) * len(names)
    found = Exchange(tuple(names), hosts, 190 * 10**9, pairs, 10, slow)
    return replace(ONE, workload="exchange", form="stock", exchange=found)


GPUS = RunUsage({"NVIDIA H200": 8}, 0.012, 87.3, 2**34, None, None, None, ["idle: n1 GPU <1>"])

STARTUP = replace(
    ONE,
    workload="startup",
    form="",
    shape=(),
    dask_tasks=0,
    seconds=(1.6,),
    phases={"imports": 0.5, "CUDA context": 1.1},
)

ALL = [
    limited(ONE, 0.6, "random"),
    replace(limited(SVD, 0.2), gpus=GPUS),
    exchanged(),
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
    return report.html(ALL, "hpcdask bench all --report r.html")


def test_it_loads_nothing(whole):
    for tag, attributes in Page(whole).tags:
        assert tag not in ("link", "iframe", "object", "base", "img")
        assert not {"src", "srcset", "data"} & set(attributes)
        assert tag == "a" or "href" not in attributes
    assert len(whole) < 2_000_000


def test_everything_is_told(whole):
    text = Page(whole).text
    for what in (
        "hpcdask bench: 8 x NVIDIA H200",
        "on n0 over tls",
        "measured 2026-11-22T10:11:12+00:00",
        "dask 2026.7.1",
        "hpcdask bench all --report r.html",
        "Xeon Platinum",
        "tuned: hpcdask's form",
        "svd: singular value decomposition",
        "generator speed: random numbers a second",
        "within nodes: 142 GB/s in the median, 95 GB/s to 190 GB/s.",
        "500.00 ms",
        "At least half of what this hardware allows: 1 of 2 workloads",
        "svd, tuned: idle: n1 GPU <1>",
        "svd, tuned runs at 20 % of memory speed",
        "random float64 normals: 1 billion/s",
        "1.82 TiB",
        "900.00 ms to 1.20 s",
        "60 % of generator speed",
        "5,861",
        "gpu1-1 to gpu1-0: slow",
        "87 %",
        "16.00 GiB",
    ):
        assert what in text
    assert text.index("gpu1-1 to gpu1-0: slow") < text.index("svd, tuned runs at")
    for what in ("cupy", "wrong", "None", "energy", "over NVLink"):
        assert what not in text
    assert "CUDA context" in whole


def test_plain_forms_are_there_for_comparison():
    """Regression: they were what to look at, and the sentence and the first item were alike."""
    stock = limited(replace(ONE, form="stock"), 0.1)
    page = Page(report.html([limited(ONE, 0.3), stock])).text
    assert page.count("array, tuned runs at 30 % of memory speed") == 1
    assert "array, stock runs at" not in page
    alone = Page(report.html([stock])).text
    assert alone.count("array, stock runs at 10 % of memory speed") == 1


def test_failed_checks_stand_out():
    wrong = replace(SVD, checks=(Check("first value", 3.0, 4.0, 0.5),))
    page = report.html([ONE, wrong])
    assert "<b>svd, tuned</b>: first value is 3.0, expected 4.0 within 0.5" in page
    assert "wrong: median, range" in page


def test_everything_is_escaped(whole):
    first, svd, exchange, startup = ALL
    found = exchange.exchange
    nasty = [
        replace(
            first,
            devices={NASTY: 1},
            hosts=(NASTY,),
            versions={NASTY: NASTY},
            date=NASTY,
            checks=(Check(NASTY, 1, 2, 0),),
        ),
        replace(svd, variant=NASTY),
        replace(exchange, exchange=replace(found, names=(NASTY, "b"), slow=(NASTY,))),
        replace(startup, phases={NASTY: 1.0}),
    ]
    page = report.html(nasty)
    assert not any(tag == "img" for tag, _ in Page(page).tags)
    assert page.count("</script>") == whole.count("</script>")
    assert Page(page).text.count("onerror=alert") > 10


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
    screen: innerWidth,
    widths: [...Bokeh.index].map(view => view.el.getBoundingClientRect().width),
  });
  document.body.append(told);
}, 500));
</script>"""


def test_a_browser_draws_it_without_errors_on_a_telephone(tmp_path, whole):
    """Regression: most points were off a screen of 390 pixels."""
    page = tmp_path / "x.html"
    page.write_text(whole.replace("<head>", f"<head>{WATCH}"))
    how = ("--window-size=390,3000", "--virtual-time-budget=3000", "--dump-dom")
    text = browser.run(tmp_path, *how, page.as_uri())
    told = json.loads(re.search(r'<pre id="told">(.*?)</pre>', text, re.DOTALL)[1])
    assert (told["errors"], told["roots"], told["idle"], told["loaded"]) == ([], 3, True, [])
    assert max(told["widths"][:2]) <= told["screen"]
