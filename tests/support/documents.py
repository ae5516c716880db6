"""The pages that people read, in parts that a test can hold to the code: blocks, commands, headings and links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "charts/heteroinference/README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_SEPARATORS = frozenset({"|", "||", "&&", "&", ";", "(", ")", ">", "<"})
_NEEDS = re.compile(r"<!-- needs: (.+) -->")
_REDIRECTION = re.compile(r"\s(>>?|<)\s*\S+")
_SHELLS = ("sh", "console", "bash")
_PROGRAMS = frozenset(("apt-get", "cosign", "curl", "helm", "hetero", "kind", "kubectl", "make", "python"))
"""Programs whose calls count in lines that are indented as code."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*")


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences."""

    language: str
    text: str


def name_of(page: Path) -> str:
    """Its path in the repository, for messages and the names of tests."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [text for found, text in _FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def headings(page: Path, *, level: int) -> list[str]:
    return [title for marks, title in _HEADING.findall(_prose(page)) if len(marks) == level]


def anchors(page: Path) -> set[str]:
    """What a link can name of the page, as GitHub makes it of headings."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for _, title in _HEADING.findall(_prose(page))}


def links(page: Path) -> list[str]:
    """Targets of links that stay in the repository."""
    return [target for target in _LINK.findall(_prose(page)) if "://" not in target]


def commands(page: Path, program: str) -> list[list[str]]:
    """Arguments of each call of a program in the page's shell blocks, and in lines that are indented as code."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    lines += [line.strip() for line in _prose(page).replace("\\\n", " ").splitlines() if line.startswith("    ")]
    return [words[1:] for line in lines for words in _calls(line) if words[0] == program]


@dataclass(frozen=True, slots=True)
class Call:
    """A program that a page calls in a block of commands."""

    words: tuple[str, ...]
    needs: str
    """Hardware or service that the page says it needs, in the comment before its block; empty: none."""

    @property
    def text(self) -> str:
        """The words, as a shell takes them."""
        return shlex.join(self.words)


def shown_calls(page: Path) -> list[Call]:
    """All calls of the page: each of its shell blocks, and of lines that are indented as code those of our programs."""
    found, needs, fence, indented = [], "", "", False
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if mark := _NEEDS.fullmatch(line):
            needs = mark[1]
        elif line.startswith("```"):
            fence = "" if fence else line.removeprefix("```") or "text"
            needs = needs if fence else ""
        elif fence in _SHELLS:
            found += [Call(tuple(words), needs) for words in _calls(_REDIRECTION.sub("", line.removeprefix("$ ")))]
        elif not fence and line.startswith("    "):
            calls = (Call(tuple(words), needs) for words in _calls(_REDIRECTION.sub("", line.strip())))
            found += [call for call in calls if call.words[0] in _PROGRAMS]
            indented = True
        elif indented and line.strip():
            needs, indented = "", False
    return found


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _calls(line: str) -> Iterator[list[str]]:
    """The programs that a line calls, each with its arguments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # a drawing, or words with an apostrophe
        return
    call: list[str] = []
    for token in [*tokens, ";"]:
        if token in _SEPARATORS:
            if call:
                yield call
            call = []
        elif call or not _ASSIGNMENT.fullmatch(token):
            call.append(token)
