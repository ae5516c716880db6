"""Mutants: small faults put into a copy of the product, each of which some test must notice.

    python -m tools.mutants                 # all; minutes
    python -m tools.mutants scheduler       # those whose name contains the word
    python -m tools.mutants --list

Each mutant replaces one piece of text in one file of a copy of the tracked files, and runs the tests that are to notice
it. They must pass on the copy without the mutant, and fail with it. tests/unit/engine/test_scheduler_mutants.py and
tests/unit/worker_model/test_sampler_mutants.py hold the mutants of the scheduler and of sampling that run as tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_FAILED: Final = (1, 2)
"""Exit statuses of pytest when a test failed; 2 where several processes stop at the first one."""
_TIMEOUT_S: Final = 900


class MutantError(Exception):
    """A mutant cannot be made, or its tests do not pass without it."""


@dataclass(frozen=True)
class Mutant:
    """One fault and the tests that must notice it."""

    name: str
    path: str
    old: str
    """Text that stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    builds: bool = False
    """True if the file is C, so that the native libraries have to be built again."""


MUTANTS: Final = (
    Mutant(
        "answers: a name that is no tool's makes JSON a call",
        "worker/hetero_gateway/engine/text/answer_parser.py",
        'and found["name"] not in self._tools',
        "and False",
        ("tests/unit/engine/test_answer_parser.py",),
    ),
    Mutant(
        "answers: an empty thought's white space is said",
        "worker/hetero_gateway/engine/text/answer_parser.py",
        "            self._state, self._skips_space = self._say, True",
        "            self._state, self._skips_space = self._say, False",
        ("tests/unit/engine/test_answer_parser.py",),
    ),
    Mutant(
        "answers: of possible calls the last is taken",
        "worker/hetero_gateway/engine/text/answer_parser.py",
        "found.start() < best[0].start()",
        "found.start() > best[0].start()",
        ("tests/unit/engine/test_answer_parser.py",),
    ),
    Mutant(
        "answers: a bracket inside a string counts",
        "worker/hetero_gateway/engine/text/call_arguments.py",
        "        if self._in_text:\n            self._in_text",
        "        if False:\n            self._in_text",
        ("tests/unit/engine/test_answer_parser.py",),
    ),
    Mutant(
        "holds: ranks keep the slots of what ended while others run",
        "worker/hetero_gateway/engine/core.py",
        "            step = self._scheduler.schedule_release(in_flight=group)",
        "            step = None",
        ("tests/unit/engine/test_core.py",),
    ),
    Mutant(
        "checkpoints: a GGUF matrix is compared with what is kept of it",
        "worker/hetero_worker/checkpoints/gguf_store.py",
        "return super().exact(part) if self.format_of(part.name) is None else self._stored_matrix(part).dequantized()",
        "return super().exact(part)",
        ("tests/unit/worker_model/test_gguf_checkpoints.py",),
    ),
    Mutant(
        "checkpoints: of rows with one scale all columns are read",
        "worker/hetero_worker/checkpoints/packed_layers.py",
        "self.columns = whole if weights.group else wanted",
        "self.columns = whole",
        ("tests/unit/worker_model/test_packed_checkpoints.py",),
    ),
    Mutant(
        "proposals: the draw behind a wrong token is kept, too",
        "worker/hetero_worker/runners/running_step.py",
        "number = num_accepted(tokens, proposal.token_ids) + 1",
        "number = min(len(tokens), num_accepted(tokens, proposal.token_ids) + 2)",
        ("tests/unit/worker_model/test_proposals.py",),
    ),
    Mutant(
        "proposals: states go back a token too few",
        "worker/hetero_worker/runners/running_step.py",
        "proposal.snapshots[number - 1]",
        "proposal.snapshots[min(number, len(proposal.snapshots) - 1)]",
        ("tests/unit/worker_model/test_proposals.py",),
    ),
    Mutant(
        "proposals: penalties do not count the proposed tokens before",
        "worker/hetero_worker/sampling/request.py",
        "if penalties is not None and ahead:",
        "if False:",
        ("tests/unit/worker_model/test_proposals.py",),
    ),
    Mutant(
        "prediction head: it takes a token's own embedding, not the next token's",
        "worker/hetero_worker/runners/prediction_head.py",
        "    _skipped = 1\n",
        "    _skipped = 0\n",
        ("tests/unit/worker_model/test_prediction_head.py",),
    ),
    Mutant(
        "draft model: a block is known by its own tokens alone",
        "worker/hetero_worker/runners/draft.py",
        "if not len(wanted) or self._prefixes[block := table[walk.blocks]] != walk.prefix:",
        "if not len(wanted) or (block := table[walk.blocks]) < 0:",
        ("tests/unit/worker_model/test_proposals.py",),
    ),
    Mutant(
        "proposals: tokens behind a stop string are counted",
        "worker/hetero_gateway/engine/output_processor.py",
        "num_unread = update.completion.num_output_tokens - opened.num_delivered",
        "num_unread = 0",
        ("tests/unit/engine/test_speculation.py",),
    ),
    Mutant(
        "tiles: what the first term cuts off is dropped",
        "worker/hetero_worker/native/compute/tile_products.h",
        "v[i] = v[i] - (f32x16)parts[i];",
        "v[i] = hc_all(0);",
        ("tests/unit/native_compute/test_tiles.py",),
        builds=True,
    ),
    Mutant(
        "exchange: the third rank's contribution is dropped",
        "worker/hetero_worker/distributed/native_exchange.c",
        "for (uint64_t term = 2; term < num_terms; term++) {\n            const float *next",
        "for (uint64_t term = 3; term < num_terms; term++) {\n            const float *next",
        ("tests/unit/worker_rank/test_native_rounds.py",),
        builds=True,
    ),
    Mutant(
        "exchange: a gather reads the first rank's area for all",
        "worker/hetero_worker/distributed/native_exchange.c",
        "memcpy(out + group->offset, area(group, seat, group->round), bytes);",
        "memcpy(out + group->offset, area(group, 0, group->round), bytes);",
        ("tests/unit/worker_rank/test_native_rounds.py",),
        builds=True,
    ),
    Mutant(
        "exchange over TCP: parts are added before they have come",
        "worker/hetero_worker/distributed/native_tcp.c",
        "ready = lesser(ready, group->got[lane][seat]);",
        "ready += 0;",
        ("tests/unit/worker_rank/test_native_rounds.py",),
        builds=True,
    ),
    Mutant(
        "exchange over TCP: whoever knows a rank's place needs no secret",
        "worker/hetero_worker/distributed/tcp/connecting.py",
        "if not hmac.compare_digest(signed, expected) or hello not in self._missing:",
        "if hello not in self._missing:",
        ("tests/unit/worker_rank/test_tcp_connecting.py",),
    ),
    Mutant(
        "experts: a sum that comes late never comes",
        "worker/hetero_worker/models/lending.py",
        "            if owed:\n",
        "            if False:\n",
        ("tests/unit/worker_model/test_expert_deferral.py",),
    ),
    Mutant(
        "experts: late are those that were chosen last, however much they count",
        "worker/hetero_worker/layers/moe.py",
        "by_share=bool(late)",
        "by_share=False",
        ("tests/unit/worker_model/test_expert_deferral.py",),
    ),
    Mutant(
        "experts that stream: a buffer is filled while the layer that it holds is computed",
        "worker/hetero_worker/models/streaming.py",
        "self._start(self._order[following], self._streams.now())",
        "self._start(self._order[following], PAST)",
        ("tests/unit/worker_model/test_expert_streaming.py",),
    ),
    Mutant(
        "experts that stream: one that has come is taken for the one that has left",
        "worker/hetero_worker/runners/experts.py",
        "stream.rename(rank, layer, leaving, arriving)",
        "stream.rename(rank, layer, leaving, leaving)",
        ("tests/unit/worker_model/test_expert_streaming.py",),
    ),
    Mutant(
        "experts: counts of before never fade",
        "worker/hetero_placement/expert_placement.py",
        "weight = 0.5 ** (counted_tokens",
        "weight = 1.0 ** (counted_tokens",
        ("tests/unit/placement/test_expert_placement.py",),
    ),
    Mutant(
        "experts: a rank goes over to what it has not read",
        "worker/hetero_worker/runners/commands.py",
        "if not (ahead and reading.is_reading):\n            reading.require()",
        "if False:\n            reading.require()",
        ("tests/unit/worker_model/test_expert_commands.py",),
    ),
    Mutant(
        "executor: a command comes between a step and its masks",
        "worker/hetero_gateway/group/executor.py",
        "while not self._masks_sent.is_set():",
        "while False:",
        ("tests/unit/group/test_executor.py",),
    ),
    Mutant(
        "group: ranks with other weights form a group",
        "worker/hetero_gateway/group/roster.py",
        "if here.get(name) != there.get(name))",
        "if (name in here) != (name in there))",
        ("tests/unit/group/test_joining.py",),
    ),
    Mutant(
        "group: a rank that leaves with its gateway ends its streams",
        "worker/hetero_gateway/group/rendezvous.py",
        "        if self.state is GroupState.DRAINING:\n            await self._core.wait_drained()",
        "        pass",
        ("tests/unit/group/test_epoch_ends.py",),
    ),
    Mutant(
        "block pool: tenants share their prefix cache",
        "worker/hetero_gateway/engine/block_pool.py",
        'hashlib.sha256(b"hetero-kv-root\\0" + cache_salt.encode())',
        'hashlib.sha256(b"hetero-kv-root\\0")',
        ("tests/unit/engine/test_block_pool.py", "tests/unit/engine/test_block_pool_traps.py"),
    ),
    Mutant(
        "block pool: a block's digest ignores the blocks before it",
        "worker/hetero_gateway/engine/block_pool.py",
        "hashlib.sha256((chain[-1] if chain else self._root) + tokens.tobytes())",
        "hashlib.sha256(self._root + tokens.tobytes())",
        ("tests/unit/engine/test_block_pool.py", "tests/unit/engine/test_block_pool_traps.py"),
    ),
    Mutant(
        "scheduler: a full prefix hit leaves no token to compute",
        "worker/hetero_gateway/engine/running_batch.py",
        "num_blocks = (completion.num_tokens - 1) // self.cache.block_size",
        "num_blocks = completion.num_tokens // self.cache.block_size",
        ("tests/unit/engine/test_scheduler.py", "tests/unit/engine/test_block_pool_traps.py"),
    ),
    Mutant(
        "scheduler: the last token that is fed back has no block",
        "worker/hetero_gateway/engine/running_batch.py",
        "self.cache.blocks_of(min(completion.num_tokens + 1, completion.max_num_tokens - 1))",
        "self.cache.blocks_of(completion.num_tokens) - 1",
        ("tests/unit/engine/test_scheduler.py", "tests/unit/engine/test_scheduler_properties.py"),
    ),
    Mutant(
        "stop strings: text may be shown that belongs to a stop string",
        "worker/hetero_gateway/engine/text/detokenizer.py",
        "shown = len(pending) - max(pattern.matched for pattern in self._patterns)",
        "shown = len(pending)",
        ("tests/unit/engine/test_stop_strings.py",),
    ),
    Mutant(
        "rank: orders of another epoch are carried out",
        "worker/hetero_worker/process/state_machine.py",
        'if body != "form_group" and arrival.message.epoch != self._epoch:',
        'if body == "form_group" and arrival.message.epoch == 0:',
        ("tests/unit/worker_rank/test_state_machine.py",),
    ),
    Mutant(
        "rotation: the sine has the wrong sign",
        "worker/hetero_worker/layers/rotary.py",
        "return torch.mul(heads, self.cos).addcmul_(swapped, self.signed_sin)",
        "return torch.mul(heads, self.cos).addcmul_(swapped, -self.signed_sin)",
        ("tests/unit/worker_model/test_decoder_reference.py",),
    ),
    Mutant(
        "sampling: top-p keeps one row too many",
        "worker/hetero_worker/sampling/device_kernels.py",
        "kept &= shares.cumsum(dim=1).sub_(shares) < top_p",
        "kept &= shares.cumsum(dim=1).sub_(shares) < top_p + 0.2",
        ("tests/unit/worker_model/test_sampler_distribution.py", "tests/unit/worker_model/test_sampler.py"),
    ),
    Mutant(
        "client: a stream that is resumed sends no tokens",
        "worker/hetero_client/resuming.py",
        "self._request.received.add(token_ids=token_ids)",
        "self._request.received.add()",
        ("tests/unit/client/test_resuming.py",),
    ),
    Mutant(
        "model directory: a link may lead out of it",
        "protos/hetero_api/model_directory.py",
        "if not real.is_relative_to(root) and not _is_cached(real):",
        "if False and not _is_cached(real):",
        ("tests/unit/api/test_model_directory.py",),
    ),
    Mutant(
        "operator: the fence lets writes pass",
        "operator/hetero_operator/cluster/fence.py",
        "return method not in _READS and",
        "return method in _READS and",
        ("tests/unit/operator/test_transport.py",),
    ),
    Mutant(
        "operator: a folder's neighbours of the same beginning are allowed",
        "operator/hetero_operator/reconcile/policy.py",
        "found.is_relative_to(folder)",
        "path.startswith(folder)",
        ("tests/unit/operator/test_policy.py",),
    ),
    Mutant(
        "operator: whoever is labelled as a gateway gets the token",
        "operator/hetero_operator/reconciler.py",
        "        and _is_made_by(pod, deployment)\n",
        "",
        ("tests/unit/operator/test_reconciler.py",),
    ),
    Mutant(
        "inside: a rank sends its token before it knows the gateway",
        "worker/hetero_worker/process/gateway_link.py",
        "        if self._tls is None:\n            return grpc.insecure",
        "        if True:\n            return grpc.insecure",
        ("tests/unit/worker_rank/test_link_tls.py",),
    ),
    Mutant(
        "inside: an authority signs what outlives it",
        "operator/hetero_operator/authority.py",
        "not_valid_after_utc > now + CERTIFICATE_LIFE]",
        "not_valid_after_utc > now]",
        ("tests/unit/operator/test_authority.py",),
    ),
)


def check(mutant: Mutant, passing: set[tuple[str, ...]]) -> bool:
    """Return whether the mutant's tests notice it. Raises MutantError.

    `passing` has the tests that are known to pass without a mutant, and gets those of this one.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "repo"
        _copy(copy)
        if mutant.tests not in passing and _run(mutant, copy) != 0:
            raise MutantError(f"{mutant.name}: its tests do not pass without it")
        passing.add(mutant.tests)
        file = copy / mutant.path
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise MutantError(f"{mutant.name}: {mutant.path} has the text {text.count(mutant.old)} times: {mutant.old}")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        return _run(mutant, copy) in _FAILED


def _copy(target: Path) -> None:
    """Copy the tracked files, as they are now, and the built libraries."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for library in (ROOT / "worker").rglob("*.so"):
        shutil.copy2(library, target / library.relative_to(ROOT))


def _run(mutant: Mutant, copy: Path) -> int:
    """Return pytest's exit status, with the copy's own sources first on the path."""
    roots = [str(copy / root) for root in ("operator", "worker", "protos")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*roots, str(copy)]), "PYTHONDONTWRITEBYTECODE": "1"}
    if mutant.builds:
        build = [sys.executable, "-m", "hetero_worker.native.build"]
        subprocess.run(build, cwd=copy, env=environment, check=True, capture_output=True)
    workers = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", workers, "-p", "no:cacheprovider", *mutant.tests]
    return subprocess.run(
        command, cwd=copy, env=environment, check=False, capture_output=True, timeout=_TIMEOUT_S
    ).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the mutants; return 1 if one lives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    alive, passing = 0, set[tuple[str, ...]]()
    for mutant in chosen:
        if options.list:
            print(mutant.name)
            continue
        caught = check(mutant, passing)
        alive += not caught
        print(f"{'caught' if caught else 'ALIVE '}  {mutant.name}", flush=True)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
