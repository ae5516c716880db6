"""A real Kubernetes control plane for tests, in the manner of controller-runtime's envtest. How to use it:

Programs. `make kubernetes` (python -m tests.support.kube.provision) finds or fetches them; binaries.py says where from.

In tests/cluster the fixtures of conftest.py give a shared control plane and a namespace a test:

    def test_something(cluster: Cluster, client: Client, namespace: str) -> None:
        client.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": namespace}})
        client.wait_for("StatefulSet", "a-cpu", namespace, until=lambda s: s["spec"]["replicas"] == 2)
        mark = cluster.audit.mark()
        ...
        assert cluster.audit.writes_of("system:serviceaccount:ns:operator", since=mark) == []

`client` (client.py) is the administrator; objects are plain dictionaries, kinds are strings. Another user, also as a
kubeconfig file for a process, straight to the server or to a proxy before it (fault_proxy.py):

    credentials = cluster.user("alice", groups=["dev"])         # or cluster.service_account("operator", namespace)
    environment = {"KUBECONFIG": str(cluster.kubeconfig(credentials, server=None))}

A control plane of the test's own, for outages or for things that fill all namespaces; five seconds and 500 MB:

    plane = start_control_plane(scheduler=True)                 # changes of Options, control_plane.py
    plane.stop_api_server(signal.SIGKILL); ...; plane.start_api_server()
    plane.cluster.client()

Without pytest: `with ControlPlane(folder, find_binaries(), Options(crds=[...])) as plane: ...`
"""
