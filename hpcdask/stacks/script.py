"""Names the lines of a script whose functions cloudpickle sends without the name of their file."""

from __future__ import annotations

import ast
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from hpcdask.node.observe import Frame, ProcessView

#: What cloudpickle puts in place of the file's name, seen in 3.1.3.
NAMELESS = "<dynamic-code>"
#: What Python calls functions without a name.
KINDS = {
    ast.Lambda: "<lambda>",
    ast.ListComp: "<listcomp>",
    ast.SetComp: "<setcomp>",
    ast.DictComp: "<dictcomp>",
    ast.GeneratorExp: "<genexpr>",
}


class Script:
    """The functions of a script, and their lines; none of what cannot be read here."""

    def __init__(self, path: str) -> None:
        self.name = os.path.basename(path)
        self._lines: list[str] = []
        self._functions: set[tuple[str, int]] = set()
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            text = Path(path).read_text()
            self._lines = text.split("\n")
            for node in ast.walk(ast.parse(text)):
                called = getattr(node, "name", KINDS.get(type(node)))
                if called and isinstance(node, (ast.stmt, ast.expr)):
                    last = node.end_lineno or node.lineno
                    self._functions |= {(called, at) for at in range(node.lineno, last + 1)}

    def named(self, process: ProcessView) -> ProcessView:
        """A process with the names of these lines, where the script has such a function there."""
        threads = [
            replace(one, frames=list(map(self._name, one.frames))) for one in process.threads
        ]
        return replace(process, threads=threads)

    def _name(self, frame: Frame) -> Frame:
        if frame.file != NAMELESS or (frame.function, frame.line) not in self._functions:
            return frame
        text = self._lines[frame.line - 1].strip()[:120]
        return replace(frame, file=self.name, text=text)
