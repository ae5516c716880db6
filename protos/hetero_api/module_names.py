"""Names of a model's modules, as configurations of quantised checkpoints list them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, Final

from hetero_api.errors import ModelError

_MAX_PATTERNS: Final = 1024
_LONGEST_PATTERN: Final = 512


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Patterns of modules' names: whole names or whole parts of them, globs, and `re:` with a regular expression."""

    parts: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()
    are_all: bool = False

    @classmethod
    def of(cls, names: Any, *, field_name: str) -> ModuleNames:
        """From a list of a configuration; None is an empty one. Raises ModelError."""
        names = names if names is not None else []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError(f"{field_name} must be a list of names, not {str(names)[:80]}")
        special = [name for name in names if name.startswith("re:") or "*" in name or "?" in name]
        if len(special) > _MAX_PATTERNS or any(len(name) > _LONGEST_PATTERN for name in special):
            raise ModelError(f"{field_name} has more than {_MAX_PATTERNS} patterns, or one is too long")
        try:
            patterns = [re.compile(name[3:] if name.startswith("re:") else translate(name)) for name in special]
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{field_name} has a regular expression that is none: {error}") from error
        return cls(frozenset(names).difference(special), tuple(patterns))

    def match(self, module: str) -> bool:
        """Return whether a pattern is the name, or whole parts of it between dots, or matches from its begin."""
        return self.are_all or self.match_by_name(module)

    def match_by_name(self, module: str) -> bool:
        """Return whether a pattern matches, other than by being for all modules."""
        if not self.parts and not self.patterns:
            return False
        parts = module.split(".")
        ends = range(len(parts) + 1)
        runs = (".".join(parts[begin:end]) for end in ends for begin in range(end))
        return any(run in self.parts for run in runs) or any(pattern.match(module) for pattern in self.patterns)

    def layers(self) -> set[int]:
        """Return the numbers of layers that names without patterns have."""
        return {int(part) for name in self.parts for part in name.split(".") if part.isdecimal() and len(part) < 6}
