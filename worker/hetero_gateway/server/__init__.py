"""The gateway's servers, and the process around them.

app           the process's main            inference    hetero.v1.Inference: requests in, events out
config        its inputs                    openai       the HTTP door
serving       from listening to the end     reading      requests of both doors to the engine's
gateway       the parts, wired              validation   bounds of messages    sampling_params   bounds, defaults
grpc_server   options, ports, guards        admin        hetero.v1.Admin       ranks             hetero.v1.Ranks
calls         how calls end                 health       grpc.health.v1, kubelet's probes        metrics   Prometheus
access        keys, principals, limits
"""
