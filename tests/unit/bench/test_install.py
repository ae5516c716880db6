"""Environments and formats: what is made in which order, once, and what is told when it cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bench.home import BenchHome
from bench.peers import environments, formats
from bench.peers.environments import ENVIRONMENTS, OWN, STAMP, PeerError, install, missing, pinned_version, run
from bench.peers.formats import FORMATS, HUGGING_FACE, ensure, path_of
from bench.peers.install import attempt

pytestmark = pytest.mark.unit


class Recorder:
    """Takes the place of `run`: keeps commands, makes the files that they name, fails where it is told to."""

    def __init__(self, *, fails_at: str = "") -> None:
        self.commands: list[list[str]] = []
        self._fails_at = fails_at

    def __call__(self, command: Sequence[str], *, log: Path, variables: Mapping[str, str] | None = None) -> None:
        self.commands.append(list(command))
        if self._fails_at and self._fails_at in command:
            raise PeerError("no such version")
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        if "bench.peers.convert" in command:
            Path(command[-2]).write_text("converted")


@pytest.fixture
def home(tmp_path: Path) -> BenchHome:
    return BenchHome(tmp_path)


def test_torch_comes_first_and_is_held_by_a_constraint(home: BenchHome, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(environments, "run", recorder)
    install(home, "ctranslate2")
    _, first, *_, last = recorder.commands
    torch = pinned_version("torch")
    assert first[-1] == torch
    assert last[-1] == "ctranslate2==4.8.5"
    constraints = Path(last[last.index("-c") + 1])
    assert torch in constraints.read_text()


def test_what_is_installed_is_left_as_it_is(home: BenchHome, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(environments, "run", recorder)
    install(home, "llama.cpp")
    assert missing(home, "llama.cpp") == ""
    done = len(recorder.commands)
    install(home, "llama.cpp")
    assert len(recorder.commands) == done


def test_an_installation_that_failed_is_not_there(home: BenchHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "run", Recorder(fails_at="llama-cpp-python==0.3.36"))
    with pytest.raises(PeerError, match="no such version"):
        install(home, "llama.cpp")
    assert "not installed" in missing(home, "llama.cpp")


def test_a_command_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    program = "import sys; print('trying'); sys.exit('no compiler')"
    with pytest.raises(PeerError, match=r"exit status 1(.|\n)*no compiler"):
        run([sys.executable, "-c", program], log=tmp_path / "log")


def converted(home: BenchHome) -> None:
    """As if llama.cpp were installed."""
    stamp = home.environment("llama.cpp") / STAMP
    stamp.parent.mkdir(parents=True)
    stamp.write_text(environments._wanted("llama.cpp"))


def test_a_format_is_made_from_the_one_it_needs_and_only_once(home: BenchHome, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(home)
    recorder = Recorder()
    monkeypatch.setattr(formats, "run", recorder)
    path = ensure(home, "model", home.root, "gguf-q8_0")
    assert path == home.format("model", "gguf-q8_0")
    assert path.read_text() == "converted"
    base = str(home.format("model", "gguf-bf16"))
    assert [(command[3], command[4]) for command in recorder.commands] == [
        ("gguf", str(home.root)),
        ("requantize", base),
    ]
    ensure(home, "model", home.root, "gguf-q8_0")
    assert len(recorder.commands) == 2


def test_a_conversion_that_broke_off_leaves_no_format(home: BenchHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "run", Recorder(fails_at="bf16"))
    with pytest.raises(PeerError):
        ensure(home, "model", home.root, "gguf-bf16")
    assert not home.format("model", "gguf-bf16").exists()


def test_a_format_without_its_environment_is_refused(home: BenchHome) -> None:
    with pytest.raises(PeerError, match="openvino is not installed"):
        ensure(home, "model", Path("weights"), "openvino-int8")


def test_the_directory_itself_needs_no_conversion(home: BenchHome) -> None:
    assert path_of(home, "model", Path("weights"), HUGGING_FACE) == Path("weights")


def test_what_fails_is_told_and_the_rest_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise PeerError("no room")

    assert attempt([("a", lambda: None), ("b", fail), ("c", lambda: None)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("a: there")
    assert said[1] == "b: FAILED: no room"
    assert said[2].startswith("c: there")


def test_every_format_is_made_in_an_environment_that_exists() -> None:
    assert {format_.environment for format_ in FORMATS.values()} <= {OWN, *ENVIRONMENTS}
