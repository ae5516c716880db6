"""The gateway of a HeteroInference group: the gRPC front door, the engine, and the group of ranks behind them.

server (gRPC) > group (ranks, placement, epochs) > engine (scheduler, blocks, tokens); each layer knows those to its
right only. No torch. Start it with `python -m hetero_gateway`.
"""
