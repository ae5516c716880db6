"""Traces of a real group: one trace from the client to the ranks, across a rank's death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.local_group import LocalGroupProcess, wait_for, write_manifest
from tests.support.span_collector import SpanCollector, attributes
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MANY = 480


def test_a_request_is_one_trace_from_the_client_to_the_ranks_across_a_ranks_death(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_tiny_model(tmp_path / "model", "llama")
    manifest = write_manifest(tmp_path, model=model, ranks=2, max_model_len=512, recovery={"maxRestarts": 1000})
    with SpanCollector() as collector:
        environment = collector.environment
        with LocalGroupProcess(manifest, home=tmp_path / "home", environment=environment) as group:
            body = {"model": "test", "prompt": "hello", "max_tokens": MANY, "ignore_eos": True, "stream": True}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            url = f"http://{group.record.http}/v1/completions"
            pieces = 0
            with httpx.stream("POST", url, json=body, headers=headers, timeout=120, trust_env=False) as answer:
                for line in answer.iter_lines():
                    pieces += line.startswith("data: {")
                    if pieces == 3:
                        pieces += 1
                        os.kill(group.record.processes["cpu-1"], signal.SIGKILL)
            assert line == "data: [DONE]" or not line
            wait_for(lambda: bool(collector.named("generate_content test")), 20, group.describe)
        (request,) = collector.named("generate_content test")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    said = attributes(request)
    assert said["gen_ai.usage.output_tokens"] == MANY
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    events = [event.name for event in request.events]
    assert events.index("group lost") < events.index("group formed")
    below = [span for span in collector.spans if span.parent_span_id == request.span_id]
    assert {span.trace_id.hex() for span in below} == {TRACE}
    names = [span.name for span in below]
    assert [names.count(phase) for phase in ("queue", "prefill", "decode")] == [1, 1, 1]
    lost_ns = next(event.time_unix_nano for event in request.events if event.name == "group lost")
    for rank in (0, 1):
        steps = [span for span in below if span.name == f"step on rank {rank}"]
        assert any(span.end_time_unix_nano < lost_ns for span in steps), names
        assert any(span.start_time_unix_nano > lost_ns for span in steps), names
        for span in steps:
            parts = attributes(span)
            seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            assert parts["hetero.exchange_s"] + parts["hetero.compute_s"] == pytest.approx(seconds)
            assert parts["hetero.rows"] >= 1
