"""Package sources of Debian, as this machine is configured, or as a variable names them.

Nothing here knows an archive's host: a machine that follows the release already has one in its apt configuration, and
any other machine is asked to name one in HETERO_DEBIAN_MIRROR.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

RELEASE: Final = "bookworm"
VARIABLE: Final = "HETERO_DEBIAN_MIRROR"
"""URL of a mirror that has `dists/bookworm`, for machines whose own apt does not follow that release."""
KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_APT: Final = Path("/etc/apt")


class NoDebianSources(Exception):
    """No package source for the release is configured or named."""


def apt_sources(environment: Mapping[str, str] = os.environ, apt: Path = _APT) -> str:
    """Return deb822 text with the release's binary and source packages, from the variable or from `apt`'s own files.

    Raises NoDebianSources.
    """
    if mirror := environment.get(VARIABLE):
        return f"Types: deb deb-src\nURIs: {mirror}\nSuites: {RELEASE}\nComponents: main\nSigned-By: {KEYRING}\n"
    stanzas = [re.sub(r"^Types:.*", "Types: deb deb-src", text, flags=re.M) for text in _stanzas(apt)]
    if not stanzas:
        raise NoDebianSources(f"apt follows no sources of Debian {RELEASE} here: set {VARIABLE} to the URL of a mirror")
    return "\n".join(stanzas)


def mirror(environment: Mapping[str, str] = os.environ, apt: Path = _APT) -> str:
    """Return the URL of a mirror with the release's main suite. Raises NoDebianSources."""
    for stanza in apt_sources(environment, apt).split("\n\n"):
        fields = dict(re.findall(r"^(URIs|Suites): *(.*)$", stanza, re.M))
        if RELEASE in fields.get("Suites", "").split():
            return str(fields["URIs"].split()[0])
    raise NoDebianSources(f"apt's sources have no suite {RELEASE}: set {VARIABLE} to the URL of a mirror")


def _stanzas(apt: Path) -> Iterator[str]:
    """Yield the deb822 stanzas of the release's suites; one-line entries are rewritten as such."""
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            text = "".join(f"{line}\n" for line in stanza.splitlines() if line.strip() and not line.startswith("#"))
            if re.search(rf"^Suites:.*\b{RELEASE}", text, re.M):
                yield text
    for path in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for line in lines:
            if entry := re.fullmatch(rf"deb(?: \[[^]]*\])? (\S+) ({RELEASE}\S*) (.+)", line.strip()):
                uri, suite, components = entry.groups()
                yield f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {components}\nSigned-By: {KEYRING}\n"
