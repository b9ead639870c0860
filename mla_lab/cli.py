"""mla-lab: run notebooks, and time the kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.group(help=__doc__, context_settings=dict(help_option_names=["-h", "--help"]))
def app():
    pass


@app.command()
@click.argument("name", required=False)
@click.option("-p", "--parameter", "pairs", nargs=2, multiple=True, metavar="KEY VALUE", help="A parameter of the notebook, as for papermill. May be repeated.")
@click.option("--out", type=click.Path(path_type=Path), help="The folder for everything, new or empty; runs/<time> where it is left out.")
def run(name, pairs, out):
    """Execute the notebook NAME (a name, a number or a path; all of them where it is left out) with papermill.

    Leaves the executed notebooks, their tables, their figures and one page that shows them side by side in a folder,
    and prints the page's path.
    """
    from mla_lab import runs

    try:
        notebooks = runs.find(name)
        parameters = runs.read_parameters(pairs)
        runs.check_parameters(notebooks, parameters)
        if out:
            runs.check_folder(out)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    folder = out or runs.new_folder(Path("runs"))
    outcomes = runs.execute(notebooks, parameters, folder)
    page = runs.write_page(folder, outcomes)
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        click.echo(f"{outcome.name} failed: {outcome.error}", err=True)
    click.echo(page.resolve())
    sys.exit(1 if failed else 0)


@app.command("list")
def list_notebooks():
    """Print the notebooks and their parameters."""
    from mla_lab import runs

    for path in runs.find(None):
        click.echo(path.stem)
        for key, entry in runs.parameters_of(path).items():
            click.echo(f"    {key} = {entry['default']}" + (f"  # {entry['help']}" if entry["help"] else ""))


@app.command()
@click.option("--out", type=click.Path(path_type=Path), help="A path without suffix: the table as Parquet and CSV. Printed only, where it is left out.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Timed calls of the emulator per row.")
def bench(out, repeats):
    """Time sparse_mla_fwd: the emulator on a CPU, the Triton kernel and its floor on a GPU."""
    from mla_lab import bench as benchmark
    from mla_lab.notebook import write_table

    frame = benchmark.run(repeats, command=f"mla-lab bench --repeats {repeats}")
    click.echo(frame.drop(columns=["device", "versions", "seed", "command"]).to_string(index=False))
    click.echo(f"{frame.device.iloc[0]}; {frame.versions.iloc[0]}")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_table(frame, out)
