"""The router's door: vLLM's engine protocol over gRPC, which Shepherd Model Gateway (SMG) speaks to its workers.

    vllm_engine   the service                     messages      its requests and answers, to and from ours
    cache_events  what the prefix cache holds     artifacts     files that a router makes the tokenizer of

Its messages come from the package smg-grpc-proto (the extra `router`), so this room is imported only where the door is
asked for. A router decides what clients see; bounds, limits and grammars of requests are those of the other doors.
"""
