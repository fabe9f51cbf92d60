"""The picture of the package's rooms, drawn from the contract in pyproject.toml.

A page says what each room is for, in any order; the contract alone says which stands on which::

    ```{rooms}
    comm: how workers exchange data
    ```
"""

import re
import tomllib
from html import escape
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT, GAP = 920, 48, 12


def floors():
    """The rooms of each floor, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (one["layers"] for one in contracts["contracts"] if one["type"] == "layers")
    named = [re.findall(r"\w+", layer) for layer in layers]
    return [floor for floor in named if floor != ["__main__"]]


def draw(floors, uses):
    """The rooms as SVG."""
    high = len(floors) * (HEIGHT + GAP) + GAP
    boxes = []
    for number, floor in enumerate(floors):
        width = (WIDTH - GAP) / len(floor) - GAP
        for place, room in enumerate(floor):
            x, y = GAP + place * (width + GAP), GAP + number * (HEIGHT + GAP)
            boxes.append(_box(room, uses[room], round(x), y, round(width)))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" role="img"
  font-family="Helvetica, Arial, sans-serif" font-size="14" text-anchor="middle">
<title>The rooms of hpcdask: each imports only what stands below it</title>
<rect x="1" y="1" width="{WIDTH - 2}" height="{high - 2}" rx="10" fill="#fff" stroke="#d5dce1"/>
{"".join(boxes)}</svg>"""


def _box(room, use, x, y, width):
    """One of them: a folder blue, a file grey."""
    is_folder = (ROOT / "hpcdask" / room).is_dir()
    fill, stroke = ("#dcebfa", "#3f7fbf") if is_folder else ("#f6f8f9", "#9aa8b1")
    middle, name = x + width // 2, f"{room}/" if is_folder else f"{room}.py"
    return f"""<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="4"
  fill="{fill}" stroke="{stroke}"/>
<text x="{middle}" y="{y + 20}" font-weight="bold" fill="#1b2a34">{name}</text>
<text x="{middle}" y="{y + 38}" font-size="12" fill="#5b6b76">{escape(use)}</text>
"""


class Rooms(Directive):
    """``{rooms}``: a line for each room, and the picture is made of them."""

    has_content = True

    def run(self):
        self.state.document.settings.record_dependencies.add(str(ROOT / "pyproject.toml"))
        uses = dict(line.split(": ", 1) for line in self.content if line)
        there = floors()
        if odd := {room for floor in there for room in floor} ^ set(uses):
            raise self.error(f"in pyproject.toml or on this page, but not in both: {sorted(odd)}")
        return [nodes.raw("", draw(there, uses), format="html")]
