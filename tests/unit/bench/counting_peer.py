"""A peer whose model counts: each new token is the one before it plus one. It prints on stdout, as libraries do."""

from __future__ import annotations

import os
import sys

from bench.peers.driver import Generated, Options, serve


class CountingPeer:
    """`dtype` "broken" ends while it generates; "mute" tells no probabilities."""

    def __init__(self, options: Options) -> None:
        print("loading ...")
        os.write(1, b"written past Python\n")
        self._options = options
        if options.dtype != "mute":
            self.score = lambda windows: [float(sum(window)) for window in windows]

    def facts(self) -> dict[str, str]:
        return {"arithmetic": "float32", "seqs": str(self._options.max_seqs)}

    def generate(self, prompts: list[list[int]], max_new: int) -> Generated:
        if self._options.dtype == "broken":
            sys.exit("out of fingers")
        print("generating ...")
        return Generated([[prompt[-1] + i for i in range(1, max_new + 1)] for prompt in prompts], 0.001)


if __name__ == "__main__":
    serve(CountingPeer)
