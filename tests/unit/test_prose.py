"""Sentences of the pages are short, plain and direct."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LATER = {"upstream.md"}  # has a sentence of 31 words
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name not in LATER]
WORDS = 30  # of a sentence, at most

#: Phrases that stand for a style which is hard to read.
AVOID = [
    r"is told\b",
    r"\bsays? so\b",
    r"^what [^.?:]*\b(show|decides?)\b",
    r"^that it is\b",
    r"\bfirst to go\b",
    r"\bthe one that means\b",
    r"\bhand over what\b",
    r"\bin order to\b",
    r"\butili[sz]e",
]


def sentences(page: str) -> list[str]:
    """The sentences of a page, without its code, comments, tables, headings and versions."""
    page = re.sub(r"^( *)(```|~~~).*?^\1\2$", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    page = re.sub(r"^ *[|#].*$|^:::.*$|^Versions: .*$", "\n", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]+`", "CODE", page)  # a command is one word
    page = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", page)
    found = []
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", page):
        plain = " ".join(block.replace("*", "").split())
        found += re.split(r"(?<=[.!?:;])\)? +(?=\S)", plain)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_sentences_are_short_and_direct(path):
    bad = []
    for sentence in sentences(path.read_text()):
        if len(sentence.split()) > WORDS:
            bad.append(f"{len(sentence.split())} words: {sentence}")
        bad += [f"{phrase}: {sentence}" for phrase in AVOID if re.search(phrase, sentence, re.I)]
    assert not bad, "\n".join(bad)


def test_a_long_sentence_and_a_phrase_are_found():
    text = "# A heading\nOne. " + "word " * 31 + ".\n\n```bash\nnot a sentence\n```\n| a table |\n"
    assert max(len(s.split()) for s in sentences(text)) > WORDS
    assert "One." in sentences(text)
    assert not re.search("table|heading|not a", " ".join(sentences(text)))
    assert any(re.search(phrase, "A line says so") for phrase in AVOID)
