"""The router: `python -m hetero_gateway route` puts Shepherd Model Gateway (SMG) before the gateways of one model.

SMG runs in this process and calls the router's door of each gateway (`--router-port`). It sends a prompt to the gateway
whose cache has its prefix. Keys stand in a file, since a command line can be read by every process of the machine; SMG
compares plain keys, so these are not the hashed ones of a gateway's keys file. Its own control plane, by which callers
could add gateways, asks for a key that nobody has.

The first gateway that answers says what SMG has to know: the size of a block and, by the chat template, the family
whose calls it reads.

In a cluster gateways come and go. With `--pods` SMG watches the API server for pods with the labels of gateways, and
sends calls to those that are ready; `--gateway` then only names whom to ask first.
"""

from __future__ import annotations

import argparse
import io
import logging
import re
import secrets
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from hetero_api.contract import EXIT_USAGE, HTTP_PORT, METRICS_PORT, TLS_CERTIFICATE, TLS_KEY
from hetero_api.program import ProgramParser
from hetero_api.spec_router import RoutingPolicy
from hetero_gateway.engine.text.answer_formats import family_of
from hetero_gateway.engine.text.tokenizer import CHAT_TEMPLATE_FILE

logger = logging.getLogger(__name__)

PROGRAM: Final = "hetero_gateway route"
PARSERS: Final[Mapping[str, str]] = {
    "Hermes": "qwen", "Qwen3Coder": "qwen_xml", "Llama3": "llama", "Mistral": "mistral_v13", "MistralList": "mistral",
    "DeepSeekV3": "deepseek", "DeepSeekV31": "deepseek31", "Glm": "glm45_moe", "MiniMaxM2": "minimax_m2",
}  # fmt: skip
"""SMG's parser of each family's calls. It knows GPT-OSS by itself."""
POLICIES: Final[Mapping[RoutingPolicy, str]] = {
    RoutingPolicy.CACHE_AWARE: "cache_aware", RoutingPolicy.LEAST_LOAD: "least_load",
    RoutingPolicy.POWER_OF_TWO: "power_of_two", RoutingPolicy.ROUND_ROBIN: "round_robin",
}  # fmt: skip
"""SMG's names of policies."""
CALL_S: Final = 5.0
"""Longest wait for one answer of a gateway at the start."""
PAUSE_S: Final = 1.0
MAX_ARCHIVE_BYTES: Final = 256 << 20
MIN_KEY_CHARS: Final = 16
DRAIN_S: Final = 60
_DOOR: Final = f"/{vllm.DESCRIPTOR.services_by_name['VllmEngine'].full_name}/"
_ADDRESS: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/]+):\d{1,5}")
_KEY_LINE: Final = re.compile(rf"([A-Za-z0-9][-._A-Za-z0-9]{{0,62}}):(\S{{{MIN_KEY_CHARS},512}})")


@dataclass(frozen=True, slots=True)
class GatewayPods:
    """Pods of gateways, as SMG finds them."""

    namespace: str
    labels: Mapping[str, str]

    @classmethod
    def from_text(cls, text: str) -> GatewayPods:
        """Read NAMESPACE/LABEL=VALUE,… Raises argparse.ArgumentTypeError."""
        namespace, _, selector = text.partition("/")
        pairs = [pair.partition("=") for pair in selector.split(",")]
        if not namespace or not all(key and equals and value for key, equals, value in pairs):
            raise argparse.ArgumentTypeError(f"{text!r} is no NAMESPACE/LABEL=VALUE,LABEL=VALUE")
        return cls(namespace, {key: value for key, _, value in pairs})


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of the process."""

    host: str
    port: int
    metrics_port: int
    gateways: tuple[str, ...]
    """`host:port` of each gateway's door for a router."""
    keys: Path | None
    """File with a line `TENANT:KEY` for each key; None: callers need none."""
    tls_dir: Path | None
    """Folder with tls.crt and tls.key; None: no TLS."""
    pods: GatewayPods | None
    """Pods that calls go to, at the port of the first of `gateways`; None: to `gateways`."""
    policy: RoutingPolicy
    """Choice of the gateway for a call."""
    drain_s: int
    """Longest time that calls in flight have once the router is asked to stop."""

    @classmethod
    def from_command_line(cls, arguments: Sequence[str]) -> RouterConfig:
        """Read the settings; exit with EXIT_USAGE and a line on stderr when one is wrong."""
        description = "Route calls of the OpenAI, Responses and Messages APIs to gateways of one model."
        parser = ProgramParser(prog=PROGRAM, description=description, allow_abbrev=False)
        add = parser.add_argument
        add("--host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine to listen on")
        add("--port", default=HTTP_PORT, type=_port, metavar="N", help="port of the APIs; default: %(default)s")
        add("--metrics-port", default=METRICS_PORT, type=_port, metavar="N", help="default: %(default)s")
        add(
            "--gateway", dest="gateways", required=True, action="append", type=_address, metavar="HOST:PORT",
            help="router's door of a gateway (its --router-port); give one for each gateway",
        )  # fmt: skip
        add("--keys", type=Path, metavar="FILE", help="file with lines TENANT:KEY; default: callers need no key")
        add("--tls-dir", type=Path, metavar="DIR", help="folder with tls.crt and tls.key; default: no TLS")
        add(
            "--pods", type=GatewayPods.from_text, metavar="NAMESPACE/LABEL=VALUE,…",
            help="in a cluster: send calls to the pods with these labels, at the port of --gateway, instead of to "
            "--gateway; the account must be allowed to list and watch pods",
        )  # fmt: skip
        add(
            "--policy", default=RoutingPolicy.CACHE_AWARE, type=RoutingPolicy, choices=list(RoutingPolicy),
            help="how the gateway of a call is chosen; default: %(default)s",
        )  # fmt: skip
        add(
            "--drain-s", default=DRAIN_S, type=_whole, metavar="S",
            help="seconds that calls in flight have once it is asked to stop; default: %(default)s",
        )  # fmt: skip
        given = vars(parser.parse_args(arguments))
        return cls(**{**given, "gateways": tuple(given["gateways"])})


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 1 and 65535")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def _address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return text


def read_keys(path: Path) -> list[tuple[str, str]]:
    """Return the tenant and key of each line; empty lines and those that begin with # mean nothing.

    Raises OSError, and ValueError that names the line but not the key.
    """
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        found = _KEY_LINE.fullmatch(text)
        if found is None:
            raise ValueError(f"{path}, line {number}: must be TENANT:KEY, the key of {MIN_KEY_CHARS} to 512 characters")
        tenant, key = found.groups()
        if any(key == known for _, known in keys):
            raise ValueError(f"{path}, line {number}: the key stands there twice; give each tenant its own")
        keys.append((tenant, key))
    if not keys:
        raise ValueError(f"{path}: has no key; add a line TENANT:KEY, or leave --keys out")
    return keys


@dataclass(frozen=True, slots=True)
class Engine:
    """Facts of the gateways that SMG has to know."""

    block_size: int
    chat_template: str

    @property
    def parser(self) -> str | None:
        """SMG's parser of calls; None: its own choice."""
        return PARSERS.get(family_of(self.chat_template))


def ask_engine(gateways: Sequence[str], *, sleep: Callable[[float], None] = time.sleep) -> Engine:
    """Return what the first gateway that answers says; wait for one without an end."""
    while True:
        for gateway in gateways:
            try:
                return _ask(gateway)
            except grpc.RpcError as error:
                logger.info("gateway=%s does not answer yet: %s", gateway, error.code())
        sleep(PAUSE_S)


def _ask(gateway: str) -> Engine:
    with grpc.insecure_channel(gateway, options=[("grpc.enable_http_proxy", 0)]) as channel:
        server = channel.unary_unary(
            f"{_DOOR}GetServerInfo",
            request_serializer=vllm.GetServerInfoRequest.SerializeToString,
            response_deserializer=vllm.GetServerInfoResponse.FromString,
        )(vllm.GetServerInfoRequest(), timeout=CALL_S)
        chunks = channel.unary_stream(
            f"{_DOOR}GetTokenizer",
            request_serializer=common.GetTokenizerRequest.SerializeToString,
            response_deserializer=common.GetTokenizerChunk.FromString,
        )(common.GetTokenizerRequest(), timeout=CALL_S)
        data = bytearray()
        for chunk in chunks:
            data += chunk.data
            if len(data) > MAX_ARCHIVE_BYTES:
                raise ValueError(f"{gateway}: its tokenizer is larger than {MAX_ARCHIVE_BYTES} bytes")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        has_template = CHAT_TEMPLATE_FILE in archive.namelist()
        template = archive.read(CHAT_TEMPLATE_FILE).decode() if has_template else ""
    return Engine(server.block_size, template)


def router_settings(config: RouterConfig, engine: Engine, keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the fields of SMG's RouterArgs that differ from its defaults."""
    tls = config.tls_dir
    return {
        "host": config.host,
        "port": config.port,
        "prometheus_host": config.host,
        "prometheus_port": config.metrics_port,
        "policy": POLICIES[config.policy],
        "shutdown_grace_period_secs": config.drain_s,
        "block_size": engine.block_size,
        "parser": "symphony",
        "tool_call_parser": engine.parser,
        "tenant_api_keys": list(keys),
        # Its control plane adds and removes workers: nobody may, so nobody has this key.
        "control_plane_api_keys": [("none", "none", secrets.token_urlsafe(32), "admin")],
        # A gateway that went and came back has calls again within seconds.
        "worker_startup_check_interval": 1,
        "health_check_interval_secs": 1,
        "health_check_timeout_secs": 2,
        "health_failure_threshold": 2,
        "health_success_threshold": 1,
        "cb_timeout_duration_secs": 2,
        **_workers(config),
        **(
            {}
            if tls is None
            else {"server_cert_path": str(tls / TLS_CERTIFICATE), "server_key_path": str(tls / TLS_KEY)}
        ),
    }


def _workers(config: RouterConfig) -> dict[str, Any]:
    """Return the settings by which SMG knows where gateways are."""
    if config.pods is None:
        urls = [f"grpc://{gateway}" for gateway in config.gateways]
        return {"worker_urls": urls, "remove_unhealthy_workers": False}
    return {
        "service_discovery": True,
        "service_discovery_namespace": config.pods.namespace,
        "service_discovery_port": int(config.gateways[0].rpartition(":")[2]),
        "selector": dict(config.pods.labels),
    }


def run(arguments: Sequence[str]) -> None:
    """Route until a stop signal ends the process; exit with EXIT_USAGE when a setting or the keys file is wrong."""
    config = RouterConfig.from_command_line(arguments)
    logging.basicConfig(
        level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s router %(name)s: %(message)s"
    )
    try:
        keys = [] if config.keys is None else read_keys(config.keys)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: --keys: {error}\n")
        sys.exit(EXIT_USAGE)
    settings = router_settings(config, ask_engine(config.gateways), keys)

    from smg.launch_router import launch_router
    from smg.router_args import RouterArgs

    launch_router(RouterArgs(**settings))
