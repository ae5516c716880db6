"""Whether memory was too little: what a cgroup of either version counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.host.memory import out_of_memory_kills

pytestmark = pytest.mark.unit

VERSION_1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
VERSION_2 = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 2\noom_group_kill 1\n"


@pytest.mark.parametrize(
    ("texts", "kills"),
    [((VERSION_2,), 2), ((None, VERSION_1), 3), ((None, None), 0), (("low 0\n", VERSION_1), 3), (("", None), 0)],
)
def test_kills_are_counted_where_the_kernel_tells_them(
    texts: tuple[str | None, ...], kills: int, tmp_path: Path
) -> None:
    paths = tuple(tmp_path / str(number) for number in range(len(texts)))
    for path, text in zip(paths, texts, strict=True):
        if text is not None:
            path.write_text(text)
    assert out_of_memory_kills(cgroup_events=paths) == kills
