"""A gateway's inputs, read once: command line, environment, the resource, the model's shape and its tokenizer."""

from __future__ import annotations

import argparse
import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from hetero_api.contract import ADMIN_PORT, ENV_ADMIN_TOKEN_FILE, RANKS_PORT
from hetero_api.manifest import load_manifest
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.model_directory import read_source
from hetero_api.program import ProgramParser, read_admin_token, read_group_token, read_log_level
from hetero_api.spec import GatewaySpec, HeteroInference, SamplingDefaults, SpeculationKind
from hetero_api.v1 import inference_pb2
from hetero_gateway.engine.config import EngineConfig
from hetero_gateway.engine.step_pace import LOOKAHEAD_S
from hetero_gateway.engine.text.tokenizer import TextTokenizer
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_gateway.group.settings import GroupSettings, check_supported, draft_problem, speculation_of
from hetero_gateway.server.sampling_params import read_sampling_defaults
from hetero_placement.decision import proposing_kind

PROGRAM: Final = "hetero_gateway"
ROUTER_PACKAGE: Final = "smg_grpc_proto"
"""Package of the messages that a router speaks."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of the process. A port of 0 lets the system choose."""

    manifest: Path
    model_dir: Path
    host: str
    inference_port: int | None
    """None: the resource's spec.gateway.service.port."""
    admin_port: int
    ranks_port: int
    http_port: int | None
    """None: the resource's spec.gateway.service.httpPort."""
    router_port: int | None
    """None: no router is served."""
    metrics_port: int | None
    """None: no probes and no metrics over HTTP."""
    state_file: Path | None
    drain_timeout_s: float | None
    """Seconds that requests in flight have once it is asked to stop; None: as the resource says."""
    token: str = field(repr=False)
    """The group's token."""
    admin_token: str | None = field(repr=False)
    """The token that callers of Admin must show; None: no token is needed."""
    keys_file: Path | None = None
    """The keys file of the front door; None: no key is needed."""
    tls_dir: Path | None = None
    """Folder with tls.crt and tls.key of the front door; None: no TLS."""
    client_ca_dir: Path | None = None
    """Folder with ca.crt, the authority of certificates that clients must show; None: they need none."""
    inside_tls_dir: Path | None = None
    """Folder with tls.crt, tls.key and ca.crt for ranks and administrators; None: they are asked for their token."""
    page: bool = True
    """False: no page at the HTTP door, whatever the resource says."""
    draft_dir: Path | None = None
    """Draft model of spec.engine.speculative; None: there is none."""
    adapter_dirs: tuple[Path, ...] = ()
    """Directories, on every rank, of adapters that spec.engine.adapters names by URI, in order."""
    log_level: str = "INFO"

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> GatewayConfig:
        """Read the settings; exit with EXIT_USAGE and a line on stderr when one is wrong."""
        parser = _parser()
        options = vars(parser.parse_args(arguments))
        try:
            config = cls(
                **{**options, "adapter_dirs": tuple(options["adapter_dirs"])},
                token=read_group_token(environment),
                admin_token=read_admin_token(environment),
                log_level=read_log_level(environment),
            )
            config.check_exposure()
            config.check_router()
            if config.client_ca_dir is not None and config.tls_dir is None:
                raise ValueError("--client-ca-dir needs --tls-dir: only TLS knows certificates of clients")
            return config
        except ValueError as error:
            parser.error(str(error))

    def check_exposure(self) -> None:
        """Raise ValueError when others than this machine's users could steer the group without a token."""
        if self.admin_token is None and not _is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached from other machines, and {ENV_ADMIN_TOKEN_FILE} is not set; set it "
                "to a file with the token that callers of hetero.v1.Admin must show, or listen on 127.0.0.1"
            )

    def check_router(self) -> None:
        """Raise ValueError if a router is to be served without the package of its messages."""
        if self.router_port is not None and find_spec(ROUTER_PACKAGE) is None:
            raise ValueError(f"--router-port needs the package {ROUTER_PACKAGE}: install heteroinference[router]")

    def check_access(self, gateway: GatewaySpec) -> None:
        """Raise UnsupportedSpecError unless there is a file for all that the resource asks of the front door."""
        missing = gateway.without_files(keys=self.keys_file, tls=self.tls_dir, client_ca=self.client_ca_dir)
        problems = [
            f"spec.gateway.{field}: no files were given for this Secret; see --keys, --tls-dir and --client-ca-dir"
            for field in missing
        ]
        if problems:
            raise UnsupportedSpecError(problems)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(prog=PROGRAM, description="The gateway of a HeteroInference group.", allow_abbrev=False)
    add = parser.add_argument
    add("--manifest", required=True, type=Path, metavar="FILE", help="the HeteroInference resource, YAML")
    add("--model", required=True, type=Path, dest="model_dir", metavar="DIR", help="model in Hugging Face format")
    add(
        "--draft",
        type=Path,
        dest="draft_dir",
        metavar="DIR",
        help="draft model; its tokenizer and config.json are read",
    )
    add(
        "--adapter",
        type=Path,
        action="append",
        default=[],
        dest="adapter_dirs",
        metavar="DIR",
        help="directory on every rank of an adapter that the resource names by uri; once for each, in its order",
    )
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine to listen on")
    add("--inference-port", type=_port, metavar="N", help="default: the resource's spec.gateway.service.port")
    add("--admin-port", default=ADMIN_PORT, type=_port, metavar="N", help="default: %(default)s")
    add("--ranks-port", default=RANKS_PORT, type=_port, metavar="N", help="default: %(default)s")
    add("--http-port", type=_port, metavar="N", help="default: the resource's spec.gateway.service.httpPort")
    add(
        "--no-page",
        action="store_false",
        dest="page",
        help="no page at the HTTP port's root; default: as the resource's spec.gateway.http.page says",
    )
    add(
        "--keys",
        type=Path,
        dest="keys_file",
        metavar="FILE",
        help="keys file of the front door; default: no key is needed",
    )
    add("--tls-dir", type=Path, metavar="DIR", help="folder with tls.crt and tls.key; default: no TLS")
    add(
        "--client-ca-dir",
        type=Path,
        metavar="DIR",
        help="folder with ca.crt, whose certificates clients must show; default: they need none",
    )
    add(
        "--inside-tls-dir",
        type=Path,
        metavar="DIR",
        help="folder with tls.crt, tls.key and ca.crt, whose certificates ranks and administrators must show; "
        "default: no TLS for them",
    )
    add(
        "--router-port",
        type=_port,
        metavar="N",
        help="port of vllm.grpc.engine.VllmEngine, for a router in front of this replica; it asks for no key and has "
        "no TLS, so let nobody else reach it; default: none",
    )
    add("--metrics-port", type=_port, metavar="N", help="/livez, /readyz and /metrics over HTTP; default: none")
    add(
        "--drain-timeout-s",
        type=_seconds,
        metavar="S",
        help="how long requests in flight may take once it is asked to stop; "
        "default: the resource's spec.gateway.drainTimeoutSeconds",
    )
    add("--state-file", type=Path, metavar="PATH", help="file to write the addresses to once all ports listen")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port number between 0 and 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return value


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Everything that a gateway is made of."""

    resource: HeteroInference
    tokenizer: TextTokenizer
    engine_config: EngineConfig
    group_settings: GroupSettings
    info: inference_pb2.GetModelInfoResponse
    sampling_defaults: inference_pb2.SamplingParams
    """Parameters of sampling where a request leaves them out."""
    directory: Path
    """The model's files."""


def read_model(
    manifest: Path, model_dir: Path, draft_dir: Path | None = None, adapter_dirs: Sequence[Path] = ()
) -> ServedModel:
    """Read the resource and the model's files; of a draft model's, only whether it can draft.

    Raises ManifestError, UnsupportedSpecError or PlanError (the resource), or ModelError (the model's files).
    """
    resource = _with_adapters(load_manifest(manifest), adapter_dirs)
    config = ModelConfig.from_directory(model_dir)
    check_supported(resource.spec, config)
    source = read_source(model_dir)
    settings = GroupSettings.from_resource(
        resource,
        config,
        model_fingerprint=model_fingerprint(model_dir),
        model_source=source.describe() if source else "",
    )
    tokenizer = TextTokenizer.from_directory(model_dir)
    if proposing_kind(settings.spec.engine.speculative, config) == SpeculationKind.DRAFT:
        settings = replace(settings, draft=_read_draft(settings, tokenizer, draft_dir))
    takes_defaults = resource.spec.engine.sampling_defaults is SamplingDefaults.MODEL
    return ServedModel(
        resource=resource,
        tokenizer=tokenizer,
        engine_config=_engine_config(resource, config, settings),
        group_settings=settings,
        info=inference_pb2.GetModelInfoResponse(
            model_uri=source.uri if source else resource.spec.model.uri,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_model_len=settings.max_model_len,
            dtype=settings.dtype,
            eos_token_ids=config.eos_token_ids,
            has_chat_template=tokenizer.has_chat_template,
            num_parameters=config.num_parameters,
            source=settings.model_source,
        ),
        sampling_defaults=read_sampling_defaults(model_dir) if takes_defaults else inference_pb2.SamplingParams(),
        directory=model_dir,
    )


def _with_adapters(resource: HeteroInference, directories: Sequence[Path]) -> HeteroInference:
    """Return the resource with directories in place of its adapters' URIs. Raises UnsupportedSpecError."""
    spec, adapters = resource.spec, resource.spec.engine.adapters
    if len(directories) != len(adapters.uris):
        raise UnsupportedSpecError(
            [
                f"spec.engine.adapters.load: names {len(adapters.uris)} adapters by uri, and this gateway was started "
                f"with {len(directories)}; see --adapter"
            ]
        )
    engine = spec.engine.model_copy(update={"adapters": adapters.brought_to([str(each) for each in directories])})
    return resource.model_copy(update={"spec": spec.model_copy(update={"engine": engine})})


def _read_draft(settings: GroupSettings, tokenizer: TextTokenizer, draft_dir: Path | None) -> ModelConfig:
    """Return the draft model's shape. Raises UnsupportedSpecError unless there is one that suits; ModelError."""
    path = "spec.engine.speculative.draft"
    if draft_dir is None:
        raise UnsupportedSpecError([f"{path}: this gateway was started without a draft model; see --draft"])
    draft = ModelConfig.from_directory(draft_dir)
    if problem := draft_problem(draft, settings.spec, max_model_len=settings.max_model_len):
        raise UnsupportedSpecError([problem])
    if difference := tokenizer.difference_to(TextTokenizer.from_directory(draft_dir)):
        raise UnsupportedSpecError([f"{path}: has another tokenizer: {difference}; take a model of the same family"])
    return draft


def _engine_config(resource: HeteroInference, config: ModelConfig, settings: GroupSettings) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=settings.spec.engine.max_num_seqs,
        max_num_batched_tokens=settings.spec.engine.max_num_batched_tokens,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        max_queued_requests=resource.spec.gateway.max_queued_requests,
        enable_prefix_caching=resource.spec.engine.enable_prefix_caching,
        max_steps_in_flight=2 if resource.spec.engine.overlap_scheduling else 1,
        lookahead_s=LOOKAHEAD_S,
        eos_token_ids=frozenset(each for each in config.eos_token_ids if each < config.vocab_size),
        vocab_size=config.vocab_size,
        keeps_states=config.delta is not None,
        speculation=speculation_of(settings.spec.engine.speculative, config),
    )
