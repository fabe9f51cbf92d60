"""A page of HTML that needs nothing but itself: its style, tables, legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from hpcdask.bench.charts import Mark

__all__ = ["Cell", "document", "legend", "section", "table"]

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f4f1; color: #222; font: 15px/1.5 Helvetica, Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; }
h2 { font-size: 19px; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 22px 0 4px; }
p { margin: 4px 0 10px; max-width: 82ch; }
.faint { color: #666660; }
section { background: #fff; border: 1px solid #deded8; border-radius: 8px; padding: 18px 22px;
  margin-top: 18px; }
.rates { display: flex; flex-wrap: wrap; gap: 10px; margin-top: 14px; }
.rate { background: #fff; border: 1px solid #deded8; border-radius: 8px; padding: 8px 16px; }
.rate b { display: block; font-size: 20px; }
.rate span, .meta { font-size: 13px; color: #666660; }
.alarm { background: #fdece2; border: 2px solid #d55e00; border-radius: 8px; padding: 10px 18px;
  margin-top: 18px; }
.alarm ul { margin: 4px 0; padding-left: 20px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 12px 0 4px; font-size: 13.5px; width: 100%; }
th { text-align: left; color: #666660; font-weight: normal; border-bottom: 1px solid #b9b9b4;
  vertical-align: bottom; }
th, td { padding: 5px 14px 5px 0; }
td { border-bottom: 1px solid #ebebe6; vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.bad { color: #a63c00; font-weight: bold; }
.bar { display: block; height: 5px; background: #e4e4e0; margin-top: 3px; min-width: 90px; }
.bar i { display: block; height: 5px; background: #0072b2; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 20px; padding: 0;
  margin: 8px 0 4px; font-size: 13px; }
.legend svg { margin-right: 6px; vertical-align: -2px; }
"""
SHAPES = {
    "dot": "<circle cx='7' cy='7' r='5.5' fill='{}'/>",
    "bar": "<rect x='1' y='2' width='12' height='10' fill='{}'/>",
    "tick": "<rect x='5' y='0' width='4' height='14' fill='{}'/>",
    "diamond": "<path d='M7 0 12 7 7 14 2 7Z' fill='{}'/>",
    "hollow": "<path d='M7 1 11.5 7 7 13 2.5 7Z' fill='#fff' stroke='{}' stroke-width='2'/>",
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table: text not yet escaped, and a bar of a fraction of its width below."""

    text: str
    fraction: float | None = None
    number: bool = False
    bad: bool = False

    def html(self, tag: str = "td") -> str:
        """Return the cell."""
        classes = " ".join(n for n in ("number", "bad") if getattr(self, n))
        bar = ""
        if self.fraction is not None:
            width = 100 * min(max(self.fraction, 0.0), 1.0)
            bar = f"<span class='bar'><i style='width:{width:.1f}%'></i></span>"
        chosen = f" class='{classes}'" if classes else ""
        return f"<{tag}{chosen}>{escape(self.text)}{bar}</{tag}>"


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table without the columns that have no text in any row."""
    shown = [i for i in range(len(heads)) if any(row[i].text for row in rows)]
    titles = "".join(Cell(heads[i], number=rows[0][i].number).html("th") for i in shown)
    lines = "".join(f"<tr>{''.join(row[i].html() for i in shown)}</tr>\n" for row in rows)
    return (
        f"<div class='wide'><table>\n<thead><tr>{titles}</tr></thead>\n"
        f"<tbody>\n{lines}</tbody></table></div>"
    )


def legend(marks: Sequence[Mark]) -> str:
    """Return what the colours and shapes of a chart mean."""
    items = "".join(
        f"<li><svg width='14' height='14'>{SHAPES[mark.shape].format(mark.colour)}</svg>"
        f"{escape(mark.meaning)}</li>"
        for mark in marks
    )
    return f"<ul class='legend'>{items}</ul>"


def section(title: str, note: str, *parts: str) -> str:
    """Return a section; title and note are not yet escaped, parts are HTML."""
    head = f"<h2>{escape(title)}</h2>\n<p class='faint'>{escape(note)}</p>"
    return "\n".join(["<section>", head, *parts, "</section>"])


def document(title: str, head: str, body: str) -> str:
    """Return the whole page; head and body are HTML."""
    return (
        "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{head}\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )
