"""Measures the GPU runner on a machine with a GPU, in a few minutes, from the source tree and without a network.

    PYTHONPATH=.:worker:protos python -m bench.gpu [--quick] [--limit-s 330]

Needs torch, numpy, protobuf, psutil, safetensors and, for the placement solver, pydantic; no gRPC server, no model
files. Ranks need no pydantic. Weights have a model's shape and random values, made where they are used. What is
measured is the worker's own runner, in processes of its own, driven by the gateway's own scheduler over pipes: a
replica without its network.

    program   what is measured, in what order, within what time      report     the table and the JSON file
    shapes    models' shapes                                         weights    a checkpoint that is made, not read
    recipes   requests                                               roofline   the least time that the device allows
    ranks     rank processes, as whoever drives them sees them       rank       the inside of one
    serving   scheduler and ranks in a loop                          orders     what is said between the two
    hetero    a model that a capped GPU cannot hold                  streaming  prompts whose experts come to the GPU
    ablations what each of graphs, overlap and fusion gives          step_profile  kernels of a step, by their time

With --device cpu the GPU's part is played by host tensors, and every result is labelled so: it shows that the program
runs, and nothing of a GPU.
"""
