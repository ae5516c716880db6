"""Real nodes for tests: kubelet, containerd, runc, CNI and kube-proxy, as root on one Linux machine.

    with RealCluster([NodePlan("node-1")], images=[archive], logs=folder, ...) as real:   # real_cluster.py
        real.cluster.client().list_all("Node")

Each node lives in a network namespace and below a cgroup of its own, so the machine's network, ports and cgroups stay
as they are. The control plane is that of tests/support/kube, listening where nodes reach it. Whatever becomes of the
test process, janitor.py takes everything away again: processes, containers, mounts, cgroups and namespaces.

What a node needs that Kubernetes does not bring is in programs.py, which says how to install what is missing.
"""
