"""The one container of a rank pod: starts the pod's ranks, watches them, and tells the kubelet how they are.

    app           the process                    config        what it is told
    supervisor    the loop over all ranks        rank_process  one rank, from start to start
    orphans       what else is to be waited for
    health        probes and metrics             cores         which cores each rank gets

    python -m hetero_worker.pod --gateway HOST:PORT --model DIR --pool NAME --ranks-per-pod N ...

What always holds: a rank that died or hung is started anew, its neighbours keep their weights; what a new start cannot
cure, or has not cured, ends the container with that rank's exit code and its last lines as the log's last lines, for
Kubernetes to show and to back off from; and no rank outlives this process.
"""
