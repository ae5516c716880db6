"""The container of a rank pod: starts the pod's ranks, watches them, and answers the kubelet's probes.

    config        command line and environment
    ranks         cores, memory, device and command line of each rank
    supervisor    the process: main, and the loop over all ranks
    health        probes and metrics

    python -m hetero_worker.pod --gateway HOST:PORT --model DIR --pool NAME --ranks-per-pod N ...

Invariants: a rank that died or hung is restarted, and its neighbours keep their weights. What a restart cannot cure, or
has not cured, ends the container with that rank's exit code, and its last lines are the log's last lines, for
Kubernetes to show and to back off from. No rank outlives this process.
"""
