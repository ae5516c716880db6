"""The `hetero` command: its subcommands, and the one place where errors become messages and exit codes.

Exit codes (hetero_api.contract): 0 done; 1 an error while running; 2 a wrong command line, manifest or request;
3 trying again cannot help; 128 + N stopped by signal N before the work was done. Data goes to standard output,
everything else to standard error. Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import signal
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
import typer.core

from hetero_api.contract import EXIT_FAILURE, EXIT_USAGE, VERSION
from hetero_api.errors import HeteroError, ManifestError
from hetero_client.cli import asking, group_commands, inspecting, key_commands, model_commands, plan_commands, serving
from hetero_client.cli.console import print_error
from hetero_client.errors import ClientError, ProcessDiedError

EPILOG = 'Start here:  hetero run smollm2-135m-instruct "Why is the sky blue?"    then:  hetero serve MODEL'


class ErrorBoundary(typer.core.TyperGroup):
    """Command group that reports errors which the user can act on as a message, not as a stack trace."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with the code of its error."""
        for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
            if isinstance(stream, TextIOWrapper):  # a terminal that is not UTF-8 lacks characters of answers
                stream.reconfigure(errors=errors)
        try:
            return super().invoke(ctx)
        except HeteroError as error:
            raise typer.Exit(report(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            print_error(f"{error.filename}: {error.strerror}" if error.filename else str(error))
            raise typer.Exit(EXIT_FAILURE) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(128 + signal.SIGINT) from error


def report(error: HeteroError) -> int:
    """Print the error for the user; return the exit code."""
    if isinstance(error, ManifestError):
        for problem in error.problems:
            print_error(f"{error.source}: {problem}" if error.source else problem)
        return EXIT_USAGE
    for line in str(error).splitlines() or [type(error).__name__]:
        print_error(line)
    if isinstance(error, ProcessDiedError):
        for line in error.log_tail:
            print_error(line, prefix="  | ")
    return error.exit_code if isinstance(error, ClientError) else EXIT_FAILURE


app = typer.Typer(
    name="hetero",
    cls=ErrorBoundary,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hetero {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """One LLM replica over GPU ranks and NUMA-pinned CPU ranks, from one YAML file.

    The same HeteroInference manifest runs on a cluster (kubectl apply) and on this machine (hetero up).
    """


app.command()(serving.up)
app.command()(serving.serve)
app.command()(serving.run)
app.command()(serving.validate)
app.command()(plan_commands.plan)
app.command()(inspecting.doctor)
app.command()(asking.generate)
app.command()(asking.chat)
app.command()(group_commands.ps)
app.command()(group_commands.topology)
app.command()(inspecting.top)
app.command()(inspecting.bench)
app.command()(group_commands.down)
app.command()(group_commands.reset_cache)
app.command()(group_commands.sleep)
app.command()(group_commands.wake)
app.command()(group_commands.drain)
app.command()(group_commands.profile)
app.command()(group_commands.place_experts)
app.command()(group_commands.update_weights)
app.command()(group_commands.load_adapter)
app.command()(group_commands.unload_adapter)
app.command()(group_commands.adapters)
app.command()(key_commands.key)
app.add_typer(model_commands.app, name="model")


def run() -> None:
    """Run the installed command."""
    app()


if __name__ == "__main__":
    run()
