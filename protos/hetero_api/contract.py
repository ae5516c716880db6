"""Names that the programs agree on: labels, ports, environment variables, metadata keys, file names.

A name that two programs use stands here and nowhere else. Environment variables are read once, by each
program's configuration.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
"""Version of the product. Worker and gateway refuse one another when theirs differ."""

# --- the custom resource -------------------------------------------------------------------------------
GROUP: Final = "heteroinference.io"
API_VERSION: Final = "v1alpha1"
KIND: Final = "HeteroInference"
PLURAL: Final = "heteroinferences"
SHORT_NAME: Final = "hinf"

# --- labels --------------------------------------------------------------------------------------------
LABEL_NAME: Final = f"{GROUP}/name"
"""The HeteroInference resource that an object belongs to."""
LABEL_ROLE: Final = f"{GROUP}/role"
"""`gateway` or `rank`."""
LABEL_POOL: Final = f"{GROUP}/pool"
"""The pool that a rank pod belongs to."""
LABEL_REVISION: Final = f"{GROUP}/revision"
"""Hash of the user's spec that an object was made from."""
LABEL_GATEWAY_REVISION: Final = f"{GROUP}/gateway-revision"
"""Hash of the user's spec that a gateway was made from: LABEL_REVISION and what only the gateway reads."""
LABEL_REPLICA: Final = f"{GROUP}/replica"
"""The replica that an object belongs to, by its ordinal; objects of replica 0 have no such label."""
LABEL_RESPONDER: Final = f"{GROUP}/responder"
"""The resource that a responder stands for; its pod is no part of a replica, and so has no LABEL_NAME."""
LABEL_ROUTER: Final = f"{GROUP}/router"
"""The resource that a router's pod routes to; it is no part of a replica, and so has no LABEL_NAME."""
ROLE_GATEWAY: Final = "gateway"
ROLE_RANK: Final = "rank"
COMPONENT_RESPONDER: Final = "responder"
"""`app.kubernetes.io/component` of a responder's objects."""
COMPONENT_ROUTER: Final = "router"
"""`app.kubernetes.io/component` of a router's objects."""

# --- annotations ---------------------------------------------------------------------------------------
ANNOTATION_APPLIED: Final = f"{GROUP}/applied"
"""Hash of what the operator applied, on every object that it owns."""
ANNOTATION_RENDER: Final = f"{GROUP}/render"
"""Version of the operator that rendered an object's pods."""
ANNOTATION_RESTARTED_AT: Final = f"{GROUP}/restartedAt"
"""On the resource: any new value restarts all ranks, as `kubectl rollout restart` does for a Deployment."""
ANNOTATION_RENEW_AFTER: Final = f"{GROUP}/renew-after"
"""On the Secret with the certificates of a group's inside: when the operator makes new ones."""
ANNOTATION_CLIENTS: Final = f"{GROUP}/clients"
"""On the gateway's NetworkPolicy: where it lets clients be. Versions that let them be anywhere set none."""

FIELD_MANAGER: Final = "heteroinference-operator"
"""Owner of the fields that the operator applies."""

# --- ports ---------------------------------------------------------------------------------------------
INFERENCE_PORT: Final = 50051
"""`hetero.v1.Inference`, health and reflection."""
HTTP_PORT: Final = 8000
"""The OpenAI-compatible endpoint, over HTTP."""
ADMIN_PORT: Final = 50052
"""`hetero.v1.Admin`."""
RANKS_PORT: Final = 50053
"""`hetero.v1.Ranks`: only ranks dial it."""
ROUTER_PORT: Final = 50054
"""`vllm.grpc.engine.VllmEngine`: only a router dials it."""
METRICS_PORT: Final = 9090
"""Prometheus metrics over HTTP; of the gateway also /livez and /readyz."""
POD_HEALTH_PORT: Final = 8080
"""A rank pod's /livez, /readyz, /startupz and /metrics over HTTP."""

# --- paths within pods ---------------------------------------------------------------------------------
POD_MODEL_DIR: Final = "/var/lib/hetero/model"
"""Where the model's files are mounted."""
POD_DRAFT_DIR: Final = "/var/lib/hetero/draft"
"""Where the draft model's files are mounted."""
POD_ADAPTERS_DIR: Final = "/var/lib/hetero/adapters"
"""Where adapters that are named by URI are mounted, each in a folder named by its place among them."""
POD_CACHE_DIR: Final = "/var/lib/hetero/cache"
"""Where fetched models are kept."""
POD_MANIFEST: Final = "/etc/hetero/config/manifest.yaml"
"""The resolved resource, as the gateway reads it."""
POD_GROUP_TOKEN_FILE: Final = "/etc/hetero/group/token"
POD_ADMIN_TOKEN_FILE: Final = "/etc/hetero/admin/token"
POD_HUB_TOKEN_FILE: Final = "/etc/hetero/hub/token"
POD_KEYS_FILE: Final = "/etc/hetero/keys/keys.yaml"
POD_ROUTER_KEYS_FILE: Final = "/etc/hetero/router-keys/keys.txt"
POD_TLS_DIR: Final = "/etc/hetero/tls"
POD_CLIENT_CA_DIR: Final = "/etc/hetero/client-ca"
POD_INSIDE_TLS_DIR: Final = "/etc/hetero/inside"
"""Certificate, key and authority that gateway and ranks know one another by."""
TLS_CERTIFICATE: Final = "tls.crt"
TLS_KEY: Final = "tls.key"
TLS_AUTHORITY: Final = "ca.crt"
"""Files of TLS, and keys of its Secrets, as cert-manager names them."""
SECRET_GROUP_TOKEN_KEY: Final = "group-token"
SECRET_ADMIN_TOKEN_KEY: Final = "admin-token"
SECRET_INSIDE_AUTHORITY: Final = "ca.crt"
SECRET_GATEWAY_CERTIFICATE: Final = "gateway.crt"
SECRET_GATEWAY_KEY: Final = "gateway.key"
SECRET_RANK_CERTIFICATE: Final = "rank.crt"
SECRET_RANK_KEY: Final = "rank.key"
SECRET_OPERATOR_CERTIFICATE: Final = "operator.crt"
SECRET_OPERATOR_KEY: Final = "operator.key"
"""Keys of the Secret with the certificates of a group's inside."""
CONFIG_MANIFEST_KEY: Final = "manifest.yaml"
CONFIG_TEMPLATES_KEY: Final = "templates.json"

# --- environment of gateway and ranks ------------------------------------------------------------------
ENV_HOME: Final = "HETERO_HOME"
"""Folder of the local model store and of run state; default `$XDG_CACHE_HOME/hetero`."""
ENV_GROUP_TOKEN_FILE: Final = "HETERO_GROUP_TOKEN_FILE"
"""File that holds the group's token: what a rank proves itself with."""
ENV_ADMIN_TOKEN_FILE: Final = "HETERO_ADMIN_TOKEN_FILE"
"""File that holds the token which callers of `hetero.v1.Admin` must show; not set: none is asked for."""
ENV_API_KEY: Final = "HETERO_API_KEY"
"""Key that clients show at the front door."""
ENV_API_KEY_FILE: Final = "HETERO_API_KEY_FILE"
"""File with the key that clients show at the front door."""
ENV_CA_FILE: Final = "HETERO_CA_FILE"
"""File with the authority, in PEM, that clients want the gateway's certificate to be of."""
ENV_CLIENT_CERT_FILE: Final = "HETERO_CLIENT_CERT_FILE"
"""File with the certificate, in PEM, that clients show."""
ENV_CLIENT_KEY_FILE: Final = "HETERO_CLIENT_KEY_FILE"
"""File with the private key of that certificate, in PEM."""
ENV_HUB_TOKEN_FILE: Final = "HETERO_HUB_TOKEN_FILE"
"""File that holds the token for gated models of the Hub."""
ENV_POD_NAME: Final = "POD_NAME"
"""Name of the pod (metadata.name), which ends with its ordinal."""
ENV_POD_IP: Final = "POD_IP"
"""Address of the pod (status.podIP): ranks meet on it, probes come to it."""
ENV_HEARTBEAT_FILE: Final = "HETERO_HEARTBEAT_FILE"
"""File that a rank writes to what it is at, for the supervisor of its pod; not set: nowhere."""
ENV_LOG_LEVEL: Final = "HETERO_LOG_LEVEL"
"""Python logging level of every program; default INFO."""
ENV_CPU_ISA: Final = "HETERO_CPU_ISA"
"""Instruction set whose kernels host ranks use, for tests and support; not set: the best that the processor has."""

# --- gRPC ----------------------------------------------------------------------------------------------
AUTHORIZATION_KEY: Final = "authorization"
"""Metadata key; value `Bearer <token>`."""
MAX_INFERENCE_MESSAGE_BYTES: Final = 8 * 1024 * 1024
MAX_RANKS_MESSAGE_BYTES: Final = 64 * 1024 * 1024

GATEWAY_SERVICES: Final = ("hetero.v1.Inference",)
"""Service names whose health `grpc.health.v1` tells, beside the whole server's empty name."""

# --- bounds that two programs judge by -----------------------------------------------------------------
LEAST_LOCAL_MEMORY_PERCENT: Final = 95
"""Less of a rank's memory on the NUMA node of its cores means that it reads its weights from another. The rest is what
other threads took, and pages that were shared before."""
MAX_DOOR_CONNECTIONS: Final = 4096
"""Connections that a door of the gateway holds; each is an open file."""

# --- process exit codes --------------------------------------------------------------------------------
EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
"""Something broke while running; a supervisor may try again."""
EXIT_USAGE: Final = 2
"""The command line or the manifest is wrong."""
EXIT_PERMANENT: Final = 3
"""Trying again cannot help: a bad model file, a configuration error found late."""
EXIT_STUCK: Final = 4
"""A rank could not leave an aborted epoch in time and ended itself."""
