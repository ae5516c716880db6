"""Where a model's parts go, and how fast that will be: cost model and solver. Arithmetic only; no torch, no network.

hardware          how fast ranks are, what lies between    solver            every way predicted, the best, and why
assumed_hardware  the same from a YAML file                decision          what it is asked and answers
from_spec         what a resource says to the solver       roles             who may own what, for each way
workload, steps   the load, the steps it is made of        tensor_search     the best split within layers
part_costs        a part of the model on one rank          layer_search      the best deal of whole layers
exchange_costs    moving activations                       search            units to slots
plan_view         what of a plan counts                    reasons           why, in words
cost_model        a step under a plan                      sweep             speed over the share of the weights
memory_model      what a part takes in memory              expert_placement  hot experts to fast ranks
closed_form       the formulas behind it all               tensor_plan, layer_plan, apportionment: plans by weights
"""
