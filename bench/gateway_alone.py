"""What the gateway costs: a real one, between real clients and a rank that answers at once, each its own process.

    python -m bench.gateway_alone [--rounds 3]

Three loads, each after a warm-up, the best of some rounds counts (whatever else runs on the machine only slows):

- 256 streams, as fast as it goes: tokens/s.
- 1 stream, ranks that take 3 ms a step: from the rank's answer to the token at the client; beside it the same over
  bare wires (bench.bare_relay), which is what gRPC alone takes on this machine at this moment. What the gateway adds to
  them is bounded; the sum of both is shown.
- 64 streams, ranks that take 3 ms a step, without and with one reader that takes a message a second: how much slower
  the others are, and by how much the gateway's memory grows over all of it.

Uses SmolLM2's tokenizer where the model is at hand, else a byte-level one made on the spot. Prints a table; exit status
1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, ENV_LOG_LEVEL
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import SMOLLM2
from hetero_client.model_store.store import ModelStore

STREAMS: Final = 256
TOKENS: Final = 200
STEP_MS: Final = 3.0
LATENCY_TOKENS: Final = 500
LEAST_TOKENS_PER_S: Final = 20_000
MOST_ADDED_MS: Final = 0.3
MOST_SLOWED: Final = 0.05
MOST_GROWN_BYTES: Final = 16 * 1024 * 1024
_PATIENCE_S: Final = 60.0
_SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "vocab_size": 2048,
    "eos_token_id": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway with its rank. `cpu_s` is processor time, so far."""

    address: str
    http_address: str
    """Empty for bare wires."""
    router_door: str
    """Empty where none was asked for."""
    gateway: psutil.Process
    rank: subprocess.Popen[str]

    @property
    def cpu_s(self) -> float:
        times = self.gateway.cpu_times()
        return float(times.user + times.system)

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the gateway."""
        return int(self.gateway.memory_info().rss)

    def load(self, **options: int) -> dict[str, Any]:
        """One run of bench.stream_load over gRPC."""
        return load("gateway", self.address, **options)

    def answers_ns(self) -> list[int]:
        """When the rank answered; it leaves."""
        self.rank.send_signal(signal.SIGTERM)
        return [int(line) for line in self.rank.communicate(timeout=_PATIENCE_S)[0].split()]


def load(door: str, address: str, **options: int) -> dict[str, Any]:
    """One run of bench.stream_load, at a door `gateway` or `http`."""
    command = [sys.executable, "-m", "bench.stream_load", f"--{door}", address]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return result


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    figures: str
    limit: str
    holds: bool


def model_directory(folder: Path) -> Path:
    """SmolLM2's, or one without weights: nothing here reads any."""
    found = ModelStore(HeteroHome.from_environment()).path_of(SMOLLM2.key)
    if (found / "tokenizer.json").exists():
        return found
    (folder / "config.json").write_text(json.dumps(_SHAPE))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    return folder


@contextlib.contextmanager
def gateway(
    *, step_ms: float, profile: Path | None = None, bare: bool = False, router_door: bool = False
) -> Iterator[Running]:
    """A gateway that serves, or the bare wires of one, with its rank."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        model = model_directory(folder)
        state = folder / "state.json"
        environment = _environment(folder)
        command = _relay_command(state) if bare else _gateway_command(folder, model, state, profile)
        command += ["--router-port=0"] if router_door else []
        stack.enter_context(_process(command, environment))
        addresses = _wait_for(state)
        rank = stack.enter_context(_process(_rank_command(addresses["ranks"], model, step_ms), environment))
        _wait_ready(addresses["inference"])
        yield Running(
            addresses["inference"], addresses.get("http", ""), addresses.get("router", ""),
            psutil.Process(addresses["pid"]), rank,
        )  # fmt: skip


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def _environment(folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text("bench-" + "x" * 32, encoding="ascii")
    token.chmod(0o600)
    root = Path(__file__).parent.parent
    paths = [*(str(root / part) for part in ("", "worker", "protos")), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        ENV_GROUP_TOKEN_FILE: str(token),
        ENV_LOG_LEVEL: "CRITICAL",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def _relay_command(state: Path) -> list[str]:
    return [sys.executable, "-m", "bench.bare_relay", f"--state-file={state}"]


def _gateway_command(folder: Path, model: Path, state: Path, profile: Path | None) -> list[str]:
    manifest = folder / "bench.yaml"
    spec = {
        "model": {"uri": f"file://{model}", "dtype": "float32", "maxModelLen": 1024},
        "pools": [{"name": "cpu", "type": "CPU", "ranks": 1}],
        "engine": {"maxNumSeqs": STREAMS, "maxNumBatchedTokens": 8192},
        "gateway": {"maxQueuedRequests": 1024},
    }
    head = {"apiVersion": "heteroinference.io/v1alpha1", "kind": "HeteroInference", "metadata": {"name": "bench"}}
    manifest.write_text(yaml.safe_dump(head | {"spec": spec}))
    profiler = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    ports = [f"--{port}-port=0" for port in ("inference", "admin", "ranks", "http")]
    return [
        sys.executable, *profiler, "-m", "hetero_gateway", f"--manifest={manifest}", f"--model={model}",
        "--host=127.0.0.1", *ports, f"--state-file={state}", "--drain-timeout-s=0",
    ]  # fmt: skip


def _rank_command(address: str, model: Path, step_ms: float) -> list[str]:
    vocabulary = ModelConfig.from_directory(model).vocab_size
    return [
        sys.executable, "-m", "bench.answering_rank", f"--gateway={address}", f"--vocabulary={vocabulary}",
        f"--fingerprint={model_fingerprint(model)}", f"--step-ms={step_ms}",
    ]  # fmt: skip


def _wait_for(state: Path) -> dict[str, Any]:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not state.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError("the gateway does not listen")
        time.sleep(0.05)
    addresses: dict[str, Any] = json.loads(state.read_text(encoding="utf-8"))
    return addresses


def _wait_ready(address: str) -> None:
    """Until a stream runs to its end."""
    deadline_s = time.monotonic() + _PATIENCE_S
    command = [sys.executable, "-m", "bench.stream_load", "--gateway", address, "--streams=1", "--tokens=1"]
    while subprocess.run(command, check=False, capture_output=True).returncode:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the gateway does not serve")


def measure_throughput(rounds: int, profile: Path | None) -> Row:
    best, cpu_us, size = 0.0, 0.0, 0.0
    with gateway(step_ms=0, profile=profile) as running:
        running.load(streams=STREAMS, tokens=20)
        for _ in range(rounds):
            before_s = running.cpu_s
            came = running.load(streams=STREAMS, tokens=TOKENS)
            if came["tokens"] != STREAMS * TOKENS:
                raise RuntimeError(f"{came['tokens']} tokens came, {STREAMS * TOKENS} had to")
            if came["tokens"] / came["wall_s"] > best:
                best = came["tokens"] / came["wall_s"]
                cpu_us = (running.cpu_s - before_s) / came["tokens"] * 1e6
                size = came["tokens"] / came["messages"]
    figures = f"{best:,.0f} tokens/s ({cpu_us:.0f} µs of processor a token, {size:.1f} tokens a message)"
    return Row(f"{STREAMS} streams", figures, f">= {LEAST_TOKENS_PER_S:,}", best >= LEAST_TOKENS_PER_S)


def measure_latency(rounds: int) -> Row:
    best, bare = _added_ms(rounds, bare=False), _added_ms(rounds, bare=True)
    median = statistics.median(best)
    p90 = best[int(len(best) * 0.9)]
    wires = statistics.median(bare)
    figures = f"{median - wires:.3f} ms added a token by the gateway: {median:.3f} (p90 {p90:.3f}), wires {wires:.3f}"
    return Row("1 stream", figures, f"<= {MOST_ADDED_MS} ms", median - wires <= MOST_ADDED_MS)


def _added_ms(rounds: int, *, bare: bool) -> list[float]:
    """From the rank's answer to the client, of each token of the best round; sorted."""
    with gateway(step_ms=STEP_MS, bare=bare) as running:
        running.load(streams=1, tokens=50)
        arrived = [running.load(streams=1, tokens=LATENCY_TOKENS)["arrived_ns"] for _ in range(rounds)]
        answered = running.answers_ns()[-rounds * LATENCY_TOKENS :]
    added: list[list[float]] = []
    for number, times in enumerate(arrived):
        if len(times) != LATENCY_TOKENS:
            raise RuntimeError(f"{len(times)} tokens came, {LATENCY_TOKENS} had to")
        part = answered[number * LATENCY_TOKENS : (number + 1) * LATENCY_TOKENS]
        added.append(sorted((came - said) / 1e6 for came, said in zip(times, part, strict=True)))
    return min(added, key=statistics.median)


def measure_slow_reader(rounds: int) -> Row:
    with gateway(step_ms=STEP_MS) as running:
        running.load(streams=64, tokens=50)
        alone, beside = [], []
        before = running.memory_bytes
        for _ in range(rounds):
            alone.append(running.load(streams=64, tokens=300)["wall_s"])
            beside.append(running.load(streams=64, tokens=300, slow=1, slow_tokens=900)["wall_s"])
        grown = running.memory_bytes - before
    slowed = min(beside) / min(alone) - 1
    figures = f"{min(alone):.2f} s alone, {min(beside):.2f} s beside it: {slowed:+.1%}"
    figures += f"; memory grew by {grown / 2**20:.1f} MiB"
    limit = f"<= {MOST_SLOWED:.0%}, {MOST_GROWN_BYTES >> 20} MiB"
    return Row("64 streams, 1 slow reader more", figures, limit, slowed <= MOST_SLOWED and grown <= MOST_GROWN_BYTES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["throughput", "latency", "slow-reader"])
    parser.add_argument("--profile", type=Path, help="write the gateway's cProfile of the first load")
    options = parser.parse_args()
    measures: dict[str, Callable[[], Row]] = {
        "throughput": lambda: measure_throughput(options.rounds, options.profile),
        "latency": lambda: measure_latency(options.rounds),
        "slow-reader": lambda: measure_slow_reader(options.rounds),
    }
    rows = [measure() for name, measure in measures.items() if options.only in (None, name)]
    for row in rows:
        print(f"{row.name:32} {row.figures:72} {row.limit:>10}  {'ok' if row.holds else 'EXCEEDED'}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
