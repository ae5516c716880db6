"""`hetero plan`: find the best placement without starting a group."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetero_client.cli import options
from hetero_client.cli.console import output, print_json, print_note

if TYPE_CHECKING:
    from hetero_api.spec import WorkloadSpec
    from hetero_client.cli.plan_inputs import PlanInputs


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="HeteroInference manifest (YAML). Without it, --assume and --model say all that is needed.",
        ),
    ] = None,
    assume: Annotated[
        str | None,
        typer.Option(
            metavar="HARDWARE",
            help="Take the hardware from this YAML file, or from the example of this name, instead of measuring this "
            "machine.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model directory, alias of a fetched model, or with --assume an example's name, to use in place of "
            "spec.model.uri.",
        ),
    ] = None,
    model_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --assume: the model's config.json; no weights are needed.")
    ] = None,
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="none|int8|int4",
            help="Without FILE: how weights are quantised at load. Default: int4, or none if the checkpoint "
            "cannot be quantised again.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw predicted tokens/s over the share of the weights: .png or .svg."),
    ] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="CHANCE",
            help="Also predict decoding with proposals (spec.engine.speculative) that are right with this chance.",
        ),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Predict every placement of a manifest's model over its ranks, pick the best, and say why.

    \b
    hetero plan examples/smollm2-cpu.yaml
    hetero plan --assume xeon6454s-rtx4090 --model deepseek-v3
    hetero plan examples/gpu-cpu-auto.yaml --assume rtx4090 --model-config config.json --plot shares.png

    Without --assume this machine is measured, with the ranks where `hetero up` would place them. That takes seconds,
    and the machine should be otherwise idle.
    """
    from hetero_placement.decision import bounds_of, quantized_config
    from hetero_placement.memory_model import MemoryModel
    from hetero_placement.solver import solve
    from hetero_placement.sweep import rates_by_load, rates_with_proposals

    _check_options(assume, model_config=model_config, model=model, plot=plot)
    inputs = _inputs(file, assume=assume, model=model, model_config=model_config, quantization=quantization)
    spec, hardware = inputs.spec, inputs.hardware
    config = quantized_config(spec, inputs.config)
    dtype, bounds = spec.dtype_in_force, bounds_of(spec, config, inputs.draft)
    workload = spec.placement.workload
    decision = solve(config, hardware, dtype=dtype, placement=spec.placement, bounds=bounds)
    bounds = bounds.drafting_at(decision.draft)
    memory = MemoryModel(config, hardware.levelled(), bounds, dtype=dtype)
    rates = rates_by_load(config, hardware, decision.options, dtype=dtype, bounds=bounds)
    proposed = (
        ()
        if acceptance is None
        else rates_with_proposals(
            config, hardware, decision.plan, dtype=dtype, workload=workload, bounds=bounds, acceptance=acceptance
        )
    )
    title = f"{inputs.title}: {_described(workload)}, {dtype}"
    if plot is not None:
        from hetero_client.cli.plan_plot import draw_plot
        from hetero_placement.sweep import sweep

        curves = sweep(config, hardware, dtype=dtype, workload=workload, bounds=bounds)
        draw_plot(curves, decision, title=title, path=plot)
        print_note(f"drawn: {plot}")
    if as_json:
        from hetero_client.cli.plan_views import decision_json

        print_json(decision_json(decision, hardware, memory, rates, proposed))
        return
    from hetero_client.cli.plan_views import (
        cache_line,
        loads_table,
        memory_table,
        options_table,
        proposals_line,
        ranks_table,
        streaming_lines,
    )

    console = output()
    console.print(title, highlight=False)
    console.print(options_table(decision, hardware))
    console.print(decision.reason, highlight=False)
    for line in streaming_lines(decision):
        console.print(line, highlight=False)
    console.print(loads_table(decision, rates))
    if rates.verdict:
        console.print(rates.verdict, highlight=False)
    for each in proposed:
        console.print(proposals_line(each, acceptance=acceptance or 0.0), highlight=False)
    console.print(memory_table(decision, hardware, memory))
    console.print(ranks_table(decision, hardware, memory))
    console.print(cache_line(decision, memory, block_size=bounds.block_size), highlight=False)


def _check_options(assume: str | None, *, model_config: Path | None, model: str | None, plot: Path | None) -> None:
    from hetero_client.cli.plan_plot import PLOT_SUFFIXES

    if model_config is not None and assume is None:
        raise typer.BadParameter("--model-config: needs --assume; measuring needs a model directory (--model)")
    if model_config is not None and model is not None:
        raise typer.BadParameter("give one of --model and --model-config")
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise typer.BadParameter(f"--plot: {plot} must end in {' or '.join(PLOT_SUFFIXES)}")


def _inputs(
    file: Path | None, *, assume: str | None, model: str | None, model_config: Path | None, quantization: str | None
) -> PlanInputs:
    from hetero_api.manifest import load_manifest
    from hetero_client.cli.plan_inputs import from_examples, from_manifest

    if file is not None:
        if quantization is not None:
            raise typer.BadParameter("--quantization: goes without FILE; a manifest says it in spec.model.quantization")
        return from_manifest(load_manifest(file), hardware=assume, model=model, model_config=model_config)
    named = model if model_config is None else str(model_config)
    if assume is None or named is None:
        raise typer.BadParameter("give a manifest, or both --assume and --model")
    return from_examples(assume, named, quantization=quantization)


def _described(workload: WorkloadSpec) -> str:
    tokens = f"prompts of {workload.prompt_tokens} and outputs of {workload.output_tokens} tokens"
    return f"{tokens}, {workload.concurrency} at a time"
