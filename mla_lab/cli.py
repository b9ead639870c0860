"""mla-lab: run notebooks, time and check the kernels, capture a model's attention."""

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
    try:
        folder = out or runs.new_folder(Path("runs"))
    except OSError as error:
        raise click.UsageError(f"--out: left out, and runs/ cannot be made a folder here ({error}); accepted: a folder") from None
    outcomes = runs.execute(notebooks, parameters, folder)
    page = runs.write_page(folder, outcomes)
    failed = [outcome for outcome in outcomes if outcome.error]
    for outcome in failed:
        click.echo(f"{outcome.name} failed: {outcome.error}", err=True)
    click.echo(page.resolve())
    sys.exit(1 if failed else 0)


def _point(outcome, varied):
    return " ".join(f"{name}={outcome['parameters'][name]}" for name in varied) or "the run"


@app.command("list")
def list_notebooks():
    """Print the notebooks and their parameters."""
    from mla_lab import runs

    for path in runs.find(None):
        click.echo(path.stem)
        for key, entry in runs.parameters_of(path).items():
            click.echo(f"    {key} = {entry['default']}" + (f"  # {entry['help']}" if entry["help"] else ""))


@app.command()
@click.argument("grid", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The sweep's folder; runs/<the grid's name> where it is left out. One that a sweep has left is resumed.")
@click.option("--jobs", type=click.IntRange(1), help="Runs at a time on this machine; one per core where it is left out.")
@click.option("--scheduler", metavar="ADDRESS", help="Run on a Dask cluster (tcp://host:8786) whose workers have mla-lab and this file system.")
@click.option("--resume/--fresh", default=True, show_default=True, help="Skip what is done, or do everything again. What failed is tried again either way.")
def sweep(grid, out, jobs, scheduler, resume):
    """Run a notebook over a grid of parameters (GRID, a YAML file), each point with papermill in a process of its own.

    Prints where the results are and which runs failed, and why. Kill it and start it again: it goes on where it was.
    `mla_lab.results(FOLDER)` reads the results, `mla-lab report FOLDER` makes a page of them.

    \b
    notebook: 02_p_scale_sweep            # a name, a number or a path
    parameters:                           # values, or lists of them: their product
      arch: [gfx942, gfx950]
      seed: [0, 1, 2]
    together:                             # optional: parameters that go together
      - {inputs: normal, topk: 256}
      - {inputs: peaky, topk: 2048}
    where: arch == "gfx950" or seed < 2   # optional: as pandas' query
    minutes: 10                           # optional limits of each run (60 minutes, no memory limit)
    memory_gib: 4
    gpu: true                             # optional: each run asks Dask for GPU=1
    """
    from mla_lab import grid as grids
    from mla_lab import sweep as sweeps

    try:
        made = grids.read(grid)
        folder = out or Path("runs") / made.name
        outcomes = sweeps.sweep(made, folder, jobs, scheduler, fresh=not resume, show=True)
    except (grids.GridError, sweeps.SweepError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        click.echo(f"stopped; the same command goes on where this ended ({folder})", err=True)
        sys.exit(130)
    failed = [o for o in outcomes if o["status"] == "failed"]
    for o in failed:
        click.echo(_point(o, made.varied) + f" failed: {o['error']} ({folder / 'runs' / o['digest']})", err=True)
    click.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} done, {len(failed)} failed; results in {folder / 'results'}")
    sys.exit(1 if failed else 0)


@app.command()
@click.option("--out", type=click.Path(path_type=Path), help="A path without suffix: the table as Parquet and CSV. Printed only, where it is left out.")
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Timed calls of the emulator per row; on a GPU replays, at least.")
@click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "triton", "hopper", "cdna"]), help="What to time on a GPU.")
@click.option("--only", default="", metavar="TEXT", help='Cases whose description has it: "decode", "DeepSeek", "16384 tokens".')
def bench(out, repeats, backend, only):
    """Time sparse_mla_fwd over decode and prefill: the emulator on a CPU; on a GPU a kernel, checked first, beside its floor."""
    from mla_lab import bench as benchmark
    from mla_lab.notebook import write_table

    command = f"mla-lab bench --repeats {repeats}" + (f" --backend {backend}" if backend != "auto" else "") + (f" --only '{only}'" if only else "")
    try:
        frame = benchmark.run(repeats, command, backend, only)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    same = ["device", "clocks", "versions", "commit", "date", "seed", "command"]
    click.echo(frame.drop(columns=same).to_string(index=False))
    click.echo("; ".join(str(v) for v in frame[same[:5]].iloc[0] if v is not None))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_table(frame, out)


@app.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A path without suffix: the table as Parquet and CSV, and the launches as JSON.")
@click.option("--repeats", default=20, show_default=True, type=click.IntRange(1), help="Replays per candidate, at least.")
@click.option("--processes", default=8, show_default=True, type=click.IntRange(1), help="How many compile and check at a time.")
@click.option("--only", default="", metavar="TEXT", help='Classes whose description has it: "fp8_dsv32_mla", "heads=\'16\'", "few=True".')
@click.option("--limit", default=600, show_default=True, type=click.FloatRange(1), help="Seconds for compiling and checking them all.")
def tune(out, repeats, processes, only, limit):
    """Search for the Hopper kernel's launches on this GPU: every candidate is checked, then timed.

    The JSON takes the place of kernels/configs/sm_90_hopper.json.
    """
    import torch

    from mla_lab import hopper
    from mla_lab import tune as tuning
    from mla_lab.arch import device_arch
    from mla_lab.notebook import device_name, versions, write_table

    here = device_arch(torch.device("cuda")) if torch.cuda.is_available() else "no GPU"
    if here != "sm_90":
        raise click.UsageError(f"device: got {here}; accepted: sm_90 (Hopper)")
    classes = [of for of in hopper.launches() if only in str(of)]
    if not classes:
        raise click.UsageError(f"--only: got {only!r}, which is in no class; accepted: part of one, as {next(iter(hopper.launches()))}")
    command = f"mla-lab tune --repeats {repeats}" + (f" --only {only!r}" if only else "")
    frame = tuning.search(classes, repeats, processes, limit)
    kept = tuning.best(frame)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_table(frame.assign(device=device_name(), versions=versions(), seed=tuning.SEED, command=command), out)
    tuning.write(kept, out.with_suffix(".json"), command)
    click.echo(frame.to_string(index=False))
    for of, launch in kept.items():
        click.echo(f"{of}: {launch}")


@app.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The text that the model reads.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The safetensors file to write.")
@click.option("--layers", help="Numbers with commas between them; every attention layer where it is left out.")
@click.option("--queries", default=24, show_default=True, type=click.IntRange(1), help="Tokens kept as queries, evenly spaced.")
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(1), help="The text is cut after so many.")
@click.option("--kv-head", default=0, show_default=True, type=click.IntRange(0), help="Which key-value head, for layers that are captured by heads.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]), help="What the model runs in.")
@click.option("--values", is_flag=True, help="Store the value projection and the layer's own output too, to check the capture by.")
@click.option("--about-model", help="What the file says of the model; its folder's name where it is left out.")
@click.option("--about-text", help="What the file says of the text; its name where it is left out.")
def capture(model, text, out, layers, queries, tokens, kv_head, dtype, values, about_model, about_text):
    """Run the transformers model in the folder MODEL over a text and store its attention as inputs for the notebooks.

    Each layer is an exact absorbed MLA, checked against the layer's own output; for glm_moe_dsa, deepseek_v32 and
    glm5_next it is the model's own latent cache, absorbed queries and indexer's choice. Needs transformers
    (pip install -e '.[capture]'). Read the file in a notebook by its path: -p inputs FILE.safetensors.
    """
    try:
        import transformers
    except ImportError:
        raise click.UsageError("transformers: not installed; pip install -e '.[capture]'") from None
    from mla_lab import capture as captures
    from mla_lab.notebook import versions

    try:
        numbers = None if layers is None else [int(n) for n in layers.split(",")]
    except ValueError:
        raise click.UsageError(f"layers: got {layers!r}; accepted: numbers with commas between them") from None
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    loaded = transformers.AutoModel.from_pretrained(model, local_files_only=True, dtype=dtype, attn_implementation="eager")
    ids = tokenizer(text.read_text(), return_tensors="pt", truncation=True, max_length=min(tokens, loaded.config.get_text_config().max_position_embeddings))["input_ids"]
    try:
        found = captures.capture(loaded, ids, numbers, queries, kv_head)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    command = f"mla-lab capture {model.name} --text {text.name} --out {out.name}" + "".join(
        f" --{name} {value}" for name, value in dict(layers=layers, queries=queries, tokens=tokens, dtype=dtype).items() if value is not None)
    captures.save(found, out, about_model or model.name, about_text or text.name, command + (" --values" if values else ""),
                  f"{versions()}, transformers {transformers.__version__}", values)
    for n, layer in found.items():
        click.echo(f"layer {n} ({layer.kind}): {layer.q.shape[1]} heads, {layer.rows.shape[1] - layer.rope} latent and {layer.rope} rope columns, "
                   f"{min(map(len, layer.lists))} to {max(map(len, layer.lists))} keys a query; against the model's own output {layer.error():.1e}")
    click.echo(f"{out}: {ids.shape[1]} tokens, {len(found)} layers, {out.stat().st_size / 1e6:.2f} MB")


@app.command()
@click.option("--arch", "archs", multiple=True, help="A profile; may be repeated. The device's own, where it is left out.")
@click.option("--recipes", default="all", show_default=True, help="Names of recipes with semicolons between them.")
@click.option("--inputs", default="normal,peaky,dominant_key,heavy_tailed,sink,uniform,indexed,minilm_alice", show_default=True, help="Names of inputs with commas between them.")
@click.option("--tokens", default=2, show_default=True, type=click.IntRange(1), help="Query tokens of synthetic inputs.")
@click.option("--topk", default=2048, show_default=True, type=click.IntRange(2), help="Keys per query of synthetic inputs.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--out", type=click.Path(path_type=Path), help="A path without suffix: the table as Parquet and CSV.")
def check(archs, recipes, inputs, tokens, topk, seed, out):
    """Hold this device's kernels against the emulator, for every recipe that they run and every input.

    The first thing to run on a GPU that nobody has tried. Without a GPU it runs the kernel in Triton's interpreter, if
    TRITON_INTERPRET=1 is set. Exits with 1 where the two are further apart than their order of sums explains.
    """
    import pandas as pd
    import torch

    from mla_lab import check as checks
    from mla_lab import notebook, portable
    from mla_lab.arch import get_profile

    gpu = torch.cuda.is_available()
    if not gpu and not portable.INTERPRETED:
        raise click.UsageError("device: got no GPU; accepted: one, or TRITON_INTERPRET=1 in the environment")
    device = "cuda" if gpu else "cpu"
    frames = []
    for arch in archs or (get_profile(None, device).name,):
        try:
            given = notebook.Parameters(arch=arch, tokens=tokens, topk=topk, seed=seed, inputs=inputs)
            chosen = notebook.recipes(recipes)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        frames.append(checks.check(given.inputs, given.profile, chosen, device, checks.KERNELS if gpu else ("triton",)))
    frame = pd.concat(frames, ignore_index=True)
    command = "mla-lab check" + "".join(f" --arch {a}" for a in archs) + f" --recipes '{recipes}' --inputs {inputs} --tokens {tokens} --topk {topk} --seed {seed}"
    frame = frame.assign(device=notebook.device_name() + ("" if gpu else ", Triton's interpreter"), versions=notebook.versions(), seed=seed, command=command)
    click.echo(frame.drop(columns=["device", "versions", "seed", "command"]).to_string(index=False))
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        notebook.write_table(frame, out)
    bad = frame[~frame.ok]
    click.echo(f"{len(frame) - len(bad)} of {len(frame)} agree; furthest apart {frame.apart.max():.1e}")
    sys.exit(1 if len(bad) else 0)


@app.command()
@click.option("--arch", "archs", multiple=True, default=("gfx942", "gfx950", "sm_90"), show_default=True, help="gfx942, gfx950, gfx1250 or sm_90; may be repeated.")
@click.option("--kernel", type=click.Choice(["portable", "cdna", "hopper"]), help="Left out: cdna on gfx942 and gfx950, else portable.")
@click.option("--recipe", "recipes", default="bf16; fp8", show_default=True, help="Names of recipes with semicolons between them.")
@click.option("--block-k", "block_ks", multiple=True, type=click.IntRange(16), default=(32, 64, 128), show_default=True, help="Keys in a tile; may be repeated.")
@click.option("--warps", "num_warps", multiple=True, type=click.IntRange(1), default=(4,), show_default=True, help="May be repeated.")
@click.option("--rope", "ropes", multiple=True, type=click.IntRange(0), default=(0, 64), show_default=True, help="Rope columns; may be repeated.")
@click.option("--kv-lora-rank", default=512, show_default=True, type=click.IntRange(16))
@click.option("--files", type=click.Path(file_okay=False, path_type=Path), help="A folder for ttgir, llir and assembly of each.")
@click.option("--out", type=click.Path(path_type=Path), help="A path without suffix: the table as Parquet and CSV.")
def compile(archs, kernel, recipes, block_ks, num_warps, ropes, kv_lora_rank, files, out):
    """Compile kernels for GPUs that are not here, and print what the compiler says of each.

    Matrix instructions, shared memory (LDS), registers, spills, waves per SIMD (AMD) or CTAs per SM (NVIDIA) and what limits
    them, code size, and the fp8 conversions in the loop over tiles, for each recipe over an fp8 cache (bf16 dots over a bf16
    cache too).
    """
    from mla_lab import compile as compiler
    from mla_lab import notebook, portable

    unknown = [arch for arch in archs if arch not in compiler.TARGETS]
    if unknown:
        raise click.UsageError(f"--arch: got {', '.join(unknown)}; accepted: {', '.join(compiler.TARGETS)}")
    if portable.INTERPRETED:
        raise click.UsageError("TRITON_INTERPRET: got 1; accepted: unset (the interpreter compiles nothing)")
    try:
        chosen = notebook.recipes(recipes).values()
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    frame = compiler.table(compiler.grid(archs, kernel, block_ks, num_warps, ropes, kv_lora_rank, list(chosen)), files=files)
    good = frame[frame.error == ""] if "error" in frame else frame
    if len(good):
        whole = [c for c in ("shared_memory", "vgpr", "agpr", "sgpr", "vgpr_spills", "sgpr_spills", "scratch_bytes", "code_bytes") if c in good]
        click.echo(good.drop(columns="error").astype({c: "Int64" for c in whole}).to_string(index=False, na_rep=""))
    for row in frame[frame.error != ""].itertuples():
        click.echo(f"{row.arch} {row.kernel} {row.cache} cache, QK {row.qk}, PV {row.pv}, rope {row.rope}, block_k {row.block_k}: {row.error}")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        notebook.write_table(frame.assign(versions=notebook.versions(), command=_compile_command(archs, kernel, recipes, block_ks, num_warps, ropes, kv_lora_rank)), out)


def _compile_command(archs, kernel, recipes, block_ks, num_warps, ropes, kv_lora_rank):
    many = lambda name, values: "".join(f" --{name} {value}" for value in values)
    return ("mla-lab compile" + many("arch", archs) + (f" --kernel {kernel}" if kernel else "") + f" --recipe '{recipes}'" + many("block-k", block_ks)
            + many("warps", num_warps) + many("rope", ropes) + f" --kv-lora-rank {kv_lora_rank}")
