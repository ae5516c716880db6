"""What narrower weights cost: perplexity on a shipped text, ours in each width beside the peers', on the same tokens.

    python -m bench.perplexity [--only NAME ...] [--model NAME] [--window 512] [--windows N]

The text is cut into windows; each token but a window's first is predicted from those before it in the window. Ours is
asked as a client asks: prompt log-probabilities over gRPC. The reference is transformers in fp32 on the 16-bit
checkpoint; a loss is a perplexity's distance from it, and what ours may lose is 0.5 % in int8 and 3 % in int4. Writes
bench/results/perplexity-DATE.json.

The demo model is distributed in blocks of 4 bits (Q4_1): formats with the same grid find their own numbers again, so
their loss on it is smaller than on a model that was never rounded.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol, cast

from tokenizers import Tokenizer

from bench.contenders import Contender
from bench.entrants import OURS, Entrant, Setting, chosen
from bench.home import RESULTS, BenchHome
from bench.machine import describe
from bench.peers.environments import PeerError
from bench.processes import end_in_order
from bench.report import aligned
from bench.shapes import DEMO, MODELS, directory_of
from bench.turns import BROKEN
from hetero_api.model_config import ModelConfig

TEXT: Final = Path(__file__).parent / "texts" / "declaration-and-constitution.txt"
REFERENCE: Final = "transformers fp32"
MOST_LOSS: Final[Mapping[int, float]] = {8: 0.005, 4: 0.03}
"""By bits of a weight, of the reference's perplexity."""
THREADS: Final = 2
PEERS: Final = ("transformers", "llama.cpp", "CTranslate2 int8")


class Scorer(Contender, Protocol):
    """A contender that tells how likely given tokens are."""

    def negative_log_likelihoods(self, windows: Sequence[Sequence[int]]) -> list[float]:
        """Sum of -ln p of each window. Raises RuntimeError where that is not told."""
        ...


@dataclass(frozen=True, slots=True)
class Score:
    """Of one entrant."""

    name: str
    bits: int
    ours: bool
    perplexity: float


def windows_of(ids: Sequence[int], length: int, most: int | None = None) -> list[list[int]]:
    """Whole windows, one after another; what is left at the end is left out. Raises ValueError if there is none."""
    windows = [list(ids[start : start + length]) for start in range(0, len(ids) - length + 1, length)][:most]
    if not windows or length < 2:
        raise ValueError(f"{len(ids)} tokens have no window of {length}")
    return windows


def perplexity(nll: Sequence[float], windows: Sequence[Sequence[int]]) -> float:
    """From -ln p, a sum a window."""
    return math.exp(sum(nll) / sum(len(window) - 1 for window in windows))


def losses(scores: Sequence[Score]) -> dict[str, float]:
    """Relative to the reference, or where it is missing to ours in 16 bit; empty where there is neither."""
    by_name = {score.name: score.perplexity for score in scores}
    base = by_name.get(REFERENCE, by_name.get(OURS[0].name))
    return {} if base is None else {name: value / base - 1 for name, value in by_name.items()}


def within(score: Score, loss: float | None) -> bool | None:
    """Whether ours loses no more than it may; None where nothing is asked."""
    if not score.ours or score.bits not in MOST_LOSS or loss is None:
        return None
    return loss <= MOST_LOSS[score.bits]


def table(scores: Sequence[Score]) -> str:
    lost = losses(scores)
    cells = [["contender", "weights", "perplexity", "loss", "at most", "met"]]
    for score in scores:
        loss = lost.get(score.name)
        met = within(score, loss)
        cells.append(
            [
                score.name,
                f"{score.bits} bit",
                f"{score.perplexity:.4f}",
                "-" if loss is None else f"{loss:+.3%}",
                "-" if met is None else f"{MOST_LOSS[score.bits]:.1%}",
                {True: "yes", False: "NO", None: "-"}[met],
            ]
        )
    return aligned(cells)


def measure(entrant: Entrant, setting: Setting, windows: Sequence[Sequence[int]]) -> Score:
    """Start it, ask it, end it. Raises PeerError, or what a contender raises that does not start."""
    contender = cast(Scorer, entrant.open(setting))
    try:
        contender.start()
        nll = contender.negative_log_likelihoods(windows)
    finally:
        contender.stop()
    return Score(entrant.name, entrant.bits, entrant.ours, perplexity(nll, windows))


def main() -> int:
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="whose name contains one of NAME")
    parser.add_argument("--model", choices=MODELS, default=DEMO)
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--windows", type=int, help="at most so many; default: the whole text")
    arguments = parser.parse_args()
    home = BenchHome.from_environment()
    directory = directory_of(arguments.model, home)
    setting = Setting(home, arguments.model, directory, ModelConfig.from_directory(directory), THREADS)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).ids
    windows = windows_of(ids, arguments.window, arguments.windows)
    scores, absent = list[Score](), dict[str, str]()
    for entrant in _entrants(arguments.only):
        try:
            scores.append(measure(entrant, setting, windows))
        except (PeerError, *BROKEN) as error:
            absent[entrant.name] = str(error)
    print(f"{arguments.model}: {TEXT.name}, {len(windows)} windows of {arguments.window} tokens\n")
    for name, why in absent.items():
        print(f"not available: {name}: {why}\n")
    print(table(scores))
    result = describe() | {
        "model": arguments.model, "text": TEXT.name, "window": arguments.window, "windows": len(windows),
        "absent": absent, "losses": losses(scores), "scores": [asdict(score) for score in scores],
    }  # fmt: skip
    path = RESULTS / f"perplexity-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")
    return 0


def _entrants(only: Sequence[str]) -> list[Entrant]:
    """The reference, ours, other peers."""
    ours = [each for each in OURS if each.ranks == 1]
    everyone = [*chosen([REFERENCE]), *ours, *(peer for peer in chosen(PEERS) if peer.name != REFERENCE)]
    wanted = [name.lower() for name in only]
    return [each for each in everyone if not wanted or any(name in each.name.lower() for name in wanted)]


if __name__ == "__main__":
    sys.exit(main())
