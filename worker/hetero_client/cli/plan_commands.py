"""`hetero plan`: find the best placement without starting a group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_client.cli import options
from hetero_client.cli.console import output, print_json, print_note, print_warning

if TYPE_CHECKING:
    from hetero_api.model_config import ModelConfig
    from hetero_api.spec import HeteroInference, WorkloadSpec
    from hetero_placement.hardware import Hardware


def plan(
    file: options.ManifestArgument,
    assume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Take the hardware from this YAML file instead of measuring this machine."),
    ] = None,
    model: options.ModelOption = None,
    model_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --assume: the model's config.json; no weights are needed.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw predicted tokens/s over the share of the weights: .png or .svg."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Predict every placement of a manifest's model over its ranks, pick the best, and say why.

    \b
    hetero plan examples/smollm2-cpu.yaml
    hetero plan examples/gpu-cpu-auto.yaml --assume examples/hardware/rtx4090.yaml --model-config config.json
    hetero plan examples/gpu-cpu-auto.yaml --assume examples/hardware/h100.yaml --plot shares.png

    Without --assume this machine is measured, with the ranks where `hetero up` would place them. That takes seconds,
    and the machine should be otherwise idle.
    """
    from hetero_api.manifest import load_manifest
    from hetero_placement.decision import bounds_of, quantized_config
    from hetero_placement.memory_model import MemoryModel
    from hetero_placement.solver import solve

    _check_options(assume, model_config=model_config, model=model, plot=plot)
    resource = load_manifest(file)
    spec = resource.spec
    hardware, stored = _hardware_and_model(resource, assume=assume, model=model, model_config=model_config)
    config = quantized_config(spec, stored)
    dtype, bounds = spec.dtype_in_force, bounds_of(spec, config)
    workload = spec.placement.workload
    decision = solve(config, hardware, dtype=dtype, placement=spec.placement, bounds=bounds)
    memory = MemoryModel(config, hardware.levelled(), bounds, dtype=dtype)
    if plot is not None:
        from hetero_client.cli.plan_views import draw_plot
        from hetero_placement.sweep import sweep

        curves = sweep(config, hardware, dtype=dtype, workload=workload, bounds=bounds)
        draw_plot(curves, decision, title=f"{resource.metadata.name}: {_described(workload)}, {dtype}", path=plot)
        print_note(f"drawn: {plot}")
    if as_json:
        from hetero_client.cli.plan_views import decision_json

        print_json(decision_json(decision, hardware, memory))
        return
    from hetero_client.cli.plan_views import cache_line, options_table, ranks_table

    console = output()
    console.print(f"{resource.metadata.name}: {_described(workload)}, {dtype}", highlight=False)
    console.print(options_table(decision, hardware))
    console.print(decision.reason, markup=False, highlight=False)
    console.print(ranks_table(decision, hardware, memory))
    console.print(cache_line(decision, memory, block_size=bounds.block_size), highlight=False)


def _check_options(assume: Path | None, *, model_config: Path | None, model: str | None, plot: Path | None) -> None:
    from hetero_client.cli.plan_views import PLOT_SUFFIXES

    if model_config is not None and assume is None:
        raise typer.BadParameter("--model-config: needs --assume; measuring needs a model directory (--model)")
    if model_config is not None and model is not None:
        raise typer.BadParameter("give one of --model and --model-config")
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise typer.BadParameter(f"--plot: {plot} must end in {' or '.join(PLOT_SUFFIXES)}")


def _hardware_and_model(
    resource: HeteroInference, *, assume: Path | None, model: str | None, model_config: Path | None
) -> tuple[Hardware, ModelConfig]:
    """Return the hardware, assumed or measured here, and the model's shape."""
    from hetero_api.hf_config import read_json
    from hetero_api.model_config import ModelConfig
    from hetero_placement.assumed_hardware import assume as assume_hardware
    from hetero_placement.assumed_hardware import load_assumed_hardware

    if assume is None:
        return _measured(resource, model)
    hardware = assume_hardware(resource.spec, load_assumed_hardware(assume), source=str(assume))
    if model_config is not None:
        return hardware, ModelConfig.from_hf(read_json(model_config.resolve()), source=str(model_config))
    return hardware, ModelConfig.from_directory(_model_directory(resource, model))


def _measured(resource: HeteroInference, model: str | None) -> tuple[Hardware, ModelConfig]:
    from hetero_api.model_config import ModelConfig
    from hetero_client.cli.plan_probe import ProbeTask, measure_here
    from hetero_client.launcher.local_plan import plan_here

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
    return measure_here(task, resource.spec), config


def _model_directory(resource: HeteroInference, model: str | None) -> Path:
    from hetero_client.home import HeteroHome
    from hetero_client.model_store.resolve import locate_named_model, resolve_model
    from hetero_client.model_store.store import ModelStore

    store = ModelStore(HeteroHome.from_environment())
    if model is not None:
        return locate_named_model(model, store)
    return resolve_model(resource.spec.model, store, report=print_note).directory


def _described(workload: WorkloadSpec) -> str:
    tokens = f"prompts of {workload.prompt_tokens} and outputs of {workload.output_tokens} tokens"
    return f"{tokens}, {workload.concurrency} at a time"
