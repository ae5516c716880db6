"""Reads a Dockerfile as far as rules about it need: stages, their parents, their instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction on one line: its word, and all that follows."""

    word: str
    text: str


@dataclass(slots=True)
class Stage:
    """From one FROM to the next."""

    name: str
    parent: str
    """Another stage, `scratch` or an image."""
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """`arguments` are those before the first stage, with their defaults."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def chain(self, target: str) -> list[Stage]:
        """A stage and its parents: what is in the image."""
        stage = self.stages[target]
        return [stage, *(self.chain(stage.parent) if stage.parent in self.stages else [])]

    def instructions(self, target: str) -> Iterator[Instruction]:
        """Of a stage and its parents, the last word first."""
        for stage in self.chain(target):
            yield from reversed(stage.instructions)


def read_dockerfile(path: Path) -> Dockerfile:
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for instruction in _instructions(path.read_text(encoding="utf-8")):
        if instruction.word == "FROM":
            parent, _, name = instruction.text.partition(" AS ")
            stage = stages[name] = Stage(name, parent)
        elif stage is not None:
            stage.instructions.append(instruction)
        else:
            name, _, default = instruction.text.partition("=")
            arguments[name] = default
    return Dockerfile(arguments, stages)


def _instructions(text: str) -> Iterator[Instruction]:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield Instruction(word, rest.strip())
