"""Inputs of `hetero plan`: the resource, its hardware and the model's shape, from a manifest or from examples alone.

Examples are files of the repository's `examples` folder, which a wheel has too: hardware as data sheets describe it,
and the config.json of models as they are published. Both go by their names, so a plan needs no manifest and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import typer

from hetero_api.hf_config import read_json
from hetero_api.model_config import ModelConfig
from hetero_api.spec import HeteroInference, HeteroInferenceSpec, SpeculationKind
from hetero_client.cli.console import print_note, print_warning
from hetero_client.cli.plan_probe import ProbeTask, measure_here
from hetero_client.home import HeteroHome
from hetero_client.launcher.local_plan import plan_here
from hetero_client.model_store.resolve import locate_named_model, resolve_draft, resolve_model
from hetero_client.model_store.store import ModelStore, Report
from hetero_placement.assumed_hardware import assume, load_assumed_hardware, whole_machine
from hetero_placement.decision import proposing_kind, quantized_config
from hetero_placement.hardware import Hardware

_PACKAGE: Final = Path(__file__).parents[1]
_LONGEST: Final = 33_792
"""Tokens of the longest sequence where there is no manifest: a prompt of 32k, and its output."""


class Examples(NamedTuple):
    """Examples of one kind: a subfolder of `examples`, and the suffix of its files."""

    folder: str
    suffix: str

    @property
    def path(self) -> Path:
        """Folder of the files: in an installed package, else in the checkout."""
        installed = _PACKAGE / "examples"
        return (installed if installed.is_dir() else _PACKAGE.parents[1] / "examples") / self.folder

    @property
    def names(self) -> list[str]:
        """Names of all of them, ascending."""
        return sorted(path.stem for path in self.path.glob(f"*{self.suffix}"))

    def find(self, name: str) -> Path | None:
        """Return the file of an example; None if there is none of this name."""
        return self.path / f"{name}{self.suffix}" if name in self.names else None


HARDWARE: Final = Examples("hardware", ".yaml")
MODELS: Final = Examples("models", ".json")


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that a placement is computed from."""

    title: str
    spec: HeteroInferenceSpec
    hardware: Hardware
    config: ModelConfig
    """With weights as they are stored."""
    draft: ModelConfig | None = None
    """The draft model that the spec names, or the model's prediction head."""


def from_examples(hardware: str, model: str, *, quantization: str | None) -> PlanInputs:
    """Return the inputs for a whole machine that a file or an example describes, and a model.

    `quantization` as in spec.model; None: int4, or none if the checkpoint has 4 bits already. Raises ManifestError and
    ModelError.
    """
    config, path = _assumed_model(model), assumed_file(hardware)
    if quantization is None:
        quantization = "none" if config.weights.method and not config.weights.is_wide else "int4"
    assumed = load_assumed_hardware(path)
    fields = {"quantization": quantization, "maxModelLen": min(config.max_position, _LONGEST)}
    resource = whole_machine(assumed, name="plan", model=fields, source=str(path))
    widths = quantization if quantization != "none" else config.weights.method or "as stored"
    title = f"{Path(model).name.removesuffix('.json')} ({widths}) on {path.stem}"
    return PlanInputs(title, resource.spec, assume(resource.spec, assumed, source=str(path)), config)


def from_manifest(
    resource: HeteroInference, *, hardware: str | None, model: str | None, model_config: Path | None
) -> PlanInputs:
    """Return the inputs for a manifest: its hardware assumed, or measured on this machine if `hardware` is None."""
    spec, title = resource.spec, resource.metadata.name
    if hardware is None:
        return _measured(resource, model)
    path = assumed_file(hardware)
    assumed = assume(spec, load_assumed_hardware(path), source=str(path))
    if model_config is not None:
        config = ModelConfig.from_hf(read_json(model_config.resolve()), source=str(model_config))
    elif model is not None:
        config = _assumed_model(model)
    else:
        config = ModelConfig.from_directory(_model_directory(resource, model))
    return PlanInputs(title, spec, assumed, config, _draft_of(spec, config))


def assumed_file(hardware: str) -> Path:
    """Return the file of assumed hardware, named by its path or as an example. Raises typer.BadParameter."""
    found = HARDWARE.find(hardware)
    if found is None and not Path(hardware).suffix:
        raise typer.BadParameter(f"--assume: {hardware} is no file and no example; examples: {_listed(HARDWARE)}")
    return found or Path(hardware)


def _assumed_model(model: str) -> ModelConfig:
    """Return the shape of a model that is named by an example, a file with its config, an alias, or a directory."""
    found = MODELS.find(model) or (Path(model) if Path(model).is_file() else None)
    if found is not None:
        return ModelConfig.from_hf(read_json(found.resolve()), source=str(found))
    directory = locate_named_model(model, ModelStore(HeteroHome.from_environment()))
    if not directory.is_dir():
        raise typer.BadParameter(f"--model: {model} is no directory and no example; examples: {_listed(MODELS)}")
    return ModelConfig.from_directory(directory)


def _listed(examples: Examples) -> str:
    return ", ".join(examples.names)


def _measured(resource: HeteroInference, model: str | None) -> PlanInputs:
    local = plan_here(resource)
    for warning in local.warnings:
        print_warning(warning)
    directory = _model_directory(resource, model)
    config = ModelConfig.from_directory(directory)
    print_note(f"measuring {len(local.ranks)} ranks of this machine")
    model_spec = resource.spec.model
    task = ProbeTask(
        local,
        directory,
        resource.spec.dtype_in_force,
        quantization=model_spec.quantization,
        quantization_group_size=model_spec.quantization_group_size,
    )
    hardware = measure_here(task, resource.spec)
    return PlanInputs(resource.metadata.name, resource.spec, hardware, config, _draft_of(resource.spec, config))


def _draft_of(spec: HeteroInferenceSpec, config: ModelConfig) -> ModelConfig | None:
    if proposing_kind(spec.engine.speculative, config) == SpeculationKind.MTP:
        return quantized_config(spec, config).prediction_head
    store = ModelStore(HeteroHome.from_environment())
    resolved = resolve_draft(spec.engine.speculative, store, report=Report(print_note))
    return None if resolved is None else ModelConfig.from_directory(resolved.directory)


def _model_directory(resource: HeteroInference, model: str | None) -> Path:
    store = ModelStore(HeteroHome.from_environment())
    if model is not None:
        return locate_named_model(model, store)
    return resolve_model(resource.spec.model, store, report=Report(print_note)).directory
