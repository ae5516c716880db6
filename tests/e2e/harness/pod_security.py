"""The Restricted profile of the Pod Security Standards, enforced by the API server itself, whatever its version.

From 1.25 on a label of a namespace is enough. Before, a Pod Security Policy does it, as strict, for everybody, and the
cluster's only one. It holds for all namespaces then.
"""

from __future__ import annotations

from tests.support.kube.client import Object
from tests.support.kube.versions import Version
from tests.support.restricted_profile import RESTRICTED_VOLUMES

NAME = "restricted"
_BY_LABEL = Version(1, 25, 0)
_NEWER_VOLUMES = {"csi", "ephemeral", "image"}
"""That not all versions before 1.25 know; nothing here has any."""


def api_server_arguments(version: Version) -> list[str]:
    """What has an API server of this version enforce it."""
    return [] if version >= _BY_LABEL else ["--enable-admission-plugins=PodSecurityPolicy"]


def policies(version: Version) -> list[Object]:
    """To be applied before any pod is made."""
    if version >= _BY_LABEL:
        return []
    anybody = {"rule": "RunAsAny"}
    policy = {
        "apiVersion": "policy/v1beta1",
        "kind": "PodSecurityPolicy",
        "metadata": {
            "name": NAME,
            "annotations": {"seccomp.security.alpha.kubernetes.io/allowedProfileNames": "runtime/default"},
        },
        "spec": {
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "requiredDropCapabilities": ["ALL"],
            "volumes": sorted(RESTRICTED_VOLUMES - _NEWER_VOLUMES),
            "runAsUser": {"rule": "MustRunAsNonRoot"},
            "seLinux": anybody,
            "supplementalGroups": anybody,
            "fsGroup": anybody,
        },
    }
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": f"{NAME}-pods"},
        "rules": [
            {"apiGroups": ["policy"], "resources": ["podsecuritypolicies"], "resourceNames": [NAME], "verbs": ["use"]}
        ],
    }
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"{NAME}-pods"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"{NAME}-pods"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:serviceaccounts"}],
    }
    return [policy, role, binding]
