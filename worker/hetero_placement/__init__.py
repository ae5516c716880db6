"""Placement: where a model's parts go, and how fast that will be. Arithmetic only; no torch, no network.

hardware          speeds of ranks and between them        solver            every way predicted, the best, and why
assumed_hardware  speeds from a YAML file                 roles             who may own what, for each way
decision          the solver's question and answer        tensor_search     the best split within layers
steps             the workload, and the steps it makes    layer_search      the best deal of whole layers
part_costs        a part of the model on one rank         search            units to slots
cost_model        a step under a plan                     shard_plans       plans dealt by weights
memory_model      memory that a part takes                expert_placement  hot experts to fast ranks
sweep             speeds of other loads, and over the share of the weights
"""
