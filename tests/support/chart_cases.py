"""Values that people install the chart with: the matrix that its renders are checked over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.helm import ADMISSION_POLICY, PROMETHEUS
from tests.support.policy_cases import STRICT

DIGEST = f"sha256:{'a' * 64}"
POLICY: Mapping[str, Any] = {
    "clusterDns": ["dns/app.example/role=resolver", "10.96.0.10/32"],
    "networkPolicy": {"enabled": True, "apiServerPorts": [443, 8443]},
    "namespaceUsers": "1000000000-1999999999",
    "insideTls": True,
    "policy": {
        "hostPaths": list(STRICT.allowed_host_paths),
        "images": list(STRICT.allowed_images),
        "secrets": list(STRICT.allowed_secrets),
        "priorityClasses": list(STRICT.allowed_priority_classes),
        "schedulers": list(STRICT.allowed_schedulers),
        "runtimeClasses": list(STRICT.allowed_runtime_classes),
    },
}
"""Values of policy_cases.STRICT."""


@dataclass(frozen=True, slots=True)
class ChartCase:
    """An installation. `apis` are those of the cluster beyond Kubernetes' own."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    release: str = "hetero"
    apis: Sequence[str] = ()


CASES: Sequence[ChartCase] = (
    ChartCase("defaults"),
    ChartCase("one namespace", {"watchNamespaces": ["team-a"]}),
    ChartCase("three namespaces", {"watchNamespaces": ["team-a", "team-b", "0"]}),
    ChartCase(
        "nothing outside namespaces",
        {
            "watchNamespaces": ["team-a"],
            "crd": {"install": False},
            "rbac": {"nodes": False, "aggregate": False},
            "policy": {"admission": False},
        },
    ),
    ChartCase(
        "everything on",
        {
            "metrics": {
                "serviceMonitor": {"enabled": True},
                "prometheusRule": {"enabled": True},
                "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Inference"}},
            },
            "networkPolicy": {"enabled": True},
            "podDisruptionBudget": {"enabled": True},
        },
        apis=[PROMETHEUS],
    ),
    ChartCase(
        "monitoring for one Prometheus",
        {
            "metrics": {
                "service": {"annotations": {"a": "b"}},
                "serviceMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "prometheus"}},
                "prometheusRule": {
                    "enabled": True,
                    "labels": {"release": "prometheus"},
                    "alertLabels": {"team": "inference"},
                    "disabled": ["HeteroInferenceOperatorDown"],
                },
            },
            "networkPolicy": {
                "enabled": True,
                "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                "apiServerPorts": [8443],
            },
        },
        apis=[PROMETHEUS],
    ),
    ChartCase(
        "mirror",
        {
            "images": {
                "registry": "registry.example.com:5000/mirror/",
                "pullPolicy": "Always",
                "operator": {"repository": "hetero/operator", "digest": DIGEST},
                "gateway": {"tag": "1.2.3"},
                "cpuWorker": {"digest": DIGEST},
            },
            "imagePullSecrets": [{"name": "registry"}],
        },
    ),
    ChartCase("images by their short names", {"images": {"registry": ""}}),
    ChartCase("own account", {"serviceAccount": {"name": "deployer", "annotations": {"a": "b"}}}),
    ChartCase("names that look like numbers", {"serviceAccount": {"name": "12345"}, "priorityClassName": "1000"}),
    ChartCase(
        "account and roles of someone else",
        {"serviceAccount": {"create": False, "name": "existing"}, "rbac": {"create": False}},
    ),
    ChartCase(
        "scheduling",
        {
            "replicas": 3,
            "priorityClassName": "system-cluster-critical",
            "nodeSelector": {"pool": "system"},
            "tolerations": [{"key": "system", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}]
                    }
                }
            },
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "heteroinference-operator"}},
                }
            ],
            "resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}},
        },
    ),
    ChartCase(
        "labels and annotations",
        {
            "commonLabels": {"team": "inference", "app.kubernetes.io/name": "mine"},
            "podLabels": {"sidecar": "no", "app.kubernetes.io/component": "mine"},
            "podAnnotations": {"prometheus.io/scrape": "true"},
        },
    ),
    ChartCase("names", {"nameOverride": "hinf"}),
    ChartCase("full name", {"fullnameOverride": "a-full-name-of-exactly-forty-characters-"}),
    ChartCase("release named as the chart", release="heteroinference"),
    ChartCase("release with the longest name", release="r" * 53),
    ChartCase("crd that goes with the release", {"crd": {"keep": False}}),
    ChartCase("no operator", {"replicas": 0}),
    ChartCase(
        "settings",
        {
            "clusterDomain": "example.internal",
            "resyncSeconds": 300,
            "workers": 10,
            "leaderElection": {"leaseSeconds": 30, "renewSeconds": 20, "retrySeconds": 3},
            "logLevel": "DEBUG",
            "runAsUser": 1000660000,
            "extraEnv": [
                {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            ],
            "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
        },
    ),
    ChartCase("users of the cluster's choice", {"runAsUser": 0}),
    ChartCase("policy", POLICY, apis=[ADMISSION_POLICY]),
    ChartCase(
        "policy of two namespaces, asking any name server",
        {
            "watchNamespaces": ["team-a", "team-b"],
            "clusterDns": ["*"],
            "networkPolicy": {"enabled": True},
            "policy": {"hostPaths": ["/"], "secrets": []},
        },
        apis=[ADMISSION_POLICY],
    ),
)
