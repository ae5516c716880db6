"""What it costs to look: a group with page, metrics and traces in use beside the same group with all of it off.

    python -m bench.overhead [--pairs 30] [--streams 8] [--model smollm2-135m]

Both groups are loaded and decode by turns (on off, off on, ...), seconds apart. *On*: somebody watches the page at the
HTTP port's root (its status twice a second, as the page asks), Prometheus scrapes /metrics every 15 s, and traces go to
a collector with 1 % of requests sampled. *Off*: no page, nobody asks for anything, no traces. A ratio is tokens/s with
all on over tokens/s with all off while the streams decode; below 1 is what looking costs. The interval is Student's, at
95 %, of the pairs' logarithms. What other processes used meanwhile is told, too. Writes
bench/results/overhead-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from bench.against import Ratio, ratios_of
from bench.home import RESULTS, BenchHome
from bench.machine import describe
from bench.ours import HeteroContender
from bench.processes import end_in_order
from bench.quiet import ForeignLoad
from bench.shapes import DEMO, MODELS, directory_of
from bench.workloads import Workload, make_prompt

PAGE_LOOK_S: Final = 0.5
SCRAPE_S: Final = 15.0
SAMPLED: Final = "0.01"
_PROMPT_TOKENS: Final = 32


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Collector of spans that counts them and forgets them."""

    def __init__(self) -> None:
        self.spans = 0

    def Export(  # noqa: N802 - the service's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take spans."""
        self.spans += sum(len(scope.spans) for part in request.resource_spans for scope in part.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its address."""
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(2))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # it has no types
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()


@contextmanager
def asking(http: str) -> Iterator[dict[str, int]]:
    """Ask for the page's status and for metrics while the block runs; how often each answered."""
    done, answers = threading.Event(), {"/page/status": 0, "/metrics": 0}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(path: str, every_s: float) -> None:
        while not done.is_set():
            with opener.open(f"http://{http}{path}", timeout=10) as answer:
                answer.read()
            answers[path] += 1
            done.wait(every_s)

    intervals_s = {"/page/status": PAGE_LOOK_S, "/metrics": SCRAPE_S}
    threads = [threading.Thread(target=ask, args=each) for each in intervals_s.items()]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        done.set()
        for thread in threads:
            thread.join()


def decode_rate(contender: HeteroContender, workload: Workload) -> float:
    """Tokens/s of all streams from the slowest one's first token on."""
    measured = contender.run(workload)
    if measured.output_tokens != workload.output_tokens:
        raise RuntimeError(f"made {measured.output_tokens} tokens, not {workload.output_tokens}")
    return (measured.output_tokens - len(workload.prompts)) / (measured.elapsed_s - measured.first_token_s)


def measure(arguments: argparse.Namespace) -> tuple[Ratio, dict[str, object]]:
    """Return the ratio and what was seen beside it."""
    model = directory_of(arguments.model, BenchHome.from_environment())
    prompts = tuple(make_prompt(model, _PROMPT_TOKENS)[number:] for number in range(arguments.streams))
    workload = Workload("decode", prompts, arguments.tokens)
    pairs: list[tuple[float, float]] = []
    with ExitStack() as stack:
        collector, address = stack.enter_context(collecting())
        traced = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": SAMPLED,
        }
        both = {
            "off": HeteroContender(model=model, ranks=1, cores=arguments.cores, options=["--no-page"]),
            "on": HeteroContender(model=model, ranks=1, cores=arguments.cores, environment=traced),
        }
        for contender in both.values():
            stack.callback(contender.stop)
            contender.start()
            decode_rate(contender, workload)  # warms up
        foreign: list[float] = []
        answers: dict[str, int] = {"/page/status": 0, "/metrics": 0}
        for number in range(arguments.pairs):
            rates: dict[str, float] = {}
            for name in ("on", "off") if number % 2 else ("off", "on"):
                load = ForeignLoad(both[name].pid)
                nobody = nullcontext(dict.fromkeys(answers, 0))
                with asking(both["on"].http) if name == "on" else nobody as answered:
                    rates[name] = decode_rate(both[name], workload)
                foreign.append(load.cores())
                answers = {path: answers[path] + answered[path] for path in answers}
            pairs.append((rates["off"], rates["on"]))
            print(f"pair {number + 1}: on {rates['on']:.1f}, off {rates['off']:.1f} tok/s", file=sys.stderr)
        seen: dict[str, object] = {
            "answers": answers,
            "spans": collector.spans,
            "foreign_cores": statistics.median(foreign),
        }
    (ratio,) = ratios_of({(f"decode at {arguments.streams} streams", "tok/s"): pairs})
    return ratio, {**seen, "pairs": pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream and run")
    parser.add_argument("--cores", type=int, default=2, help="of the group's one rank")
    parser.add_argument("--model", choices=MODELS, default=DEMO)
    arguments = parser.parse_args()
    end_in_order()
    ratio, seen = measure(arguments)
    print(
        f"{ratio.entrant}: on {ratio.this:.1f}, off {ratio.other:.1f} tok/s; on/off {ratio.ratio:.3f}, "
        f"95 % {ratio.low:.3f} to {ratio.high:.3f}, {ratio.pairs} pairs; others used {seen['foreign_cores']:.2f} cores"
    )
    path = RESULTS / f"overhead-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.write_text(json.dumps(describe() | {"ratio": asdict(ratio)} | seen, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
