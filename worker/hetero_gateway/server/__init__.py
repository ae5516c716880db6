"""The gateway's face: gRPC services, and the process around them.

inference    hetero.v1.Inference         validation, prompts, events   requests in, events out
admin        hetero.v1.Admin             statuses                      errors as gRPC statuses
ranks        hetero.v1.Ranks             metrics                       Prometheus
health       grpc.health.v1              listening, state_file         ports
gateway      the parts, wired            config, app, stopping         the process
bearer       tokens                      probes, loop_reader           what the kubelet asks
"""
