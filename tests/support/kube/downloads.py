"""Fetching files over https, with one distinction that matters: not reachable from here, or reachable and wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.request import getproxies

import urllib3

from tests.support.kube.errors import ProvisionFailed, SourceUnreachable

Say = Callable[[str], None]
"""Tells the person who waits."""

TIMEOUT = urllib3.Timeout(connect=10.0, read=60.0)
CHUNK_BYTES = 1 << 20


def fetch_text(url: str) -> str:
    """A small file."""
    return _open(url, preload=True).data.decode()


def fetch_file(url: str, target: Path) -> Path:
    """A large file, streamed to `target`."""
    answer = _open(url, preload=False)
    try:
        with target.open("wb") as file:
            for chunk in answer.stream(CHUNK_BYTES):
                file.write(chunk)
    except urllib3.exceptions.HTTPError as error:
        raise SourceUnreachable(f"{url} broke off: {error}") from error
    finally:
        answer.release_conn()
    return target


def _open(url: str, *, preload: bool) -> urllib3.BaseHTTPResponse:
    try:
        answer = _pool().request("GET", url, preload_content=preload, timeout=TIMEOUT, retries=urllib3.Retry(3))
    except urllib3.exceptions.MaxRetryError as error:
        cause = str(error.reason).rpartition(": ")[2]
        raise SourceUnreachable(f"{url} cannot be reached: {cause}") from error
    if answer.status in (403, 407, 502, 503):  # what a proxy answers for a host that it keeps closed
        raise SourceUnreachable(f"{url}: {answer.status} {answer.reason}")
    if answer.status != 200:
        raise ProvisionFailed(f"{url}: {answer.status} {answer.reason}")
    return answer


def _pool() -> urllib3.PoolManager:
    proxy = getproxies().get("https")
    return urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager()
