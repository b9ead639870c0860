"""mla-lab and papermill, as a user calls them."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from mla_lab import notebook, runs

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
SMALL = "-p tokens 1 -p heads 2 -p topk 256 -p inputs normal,dominant_key".split()
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PATH": f"{BIN}:{os.environ['PATH']}"}


def call(*arguments, cwd):
    return subprocess.run([str(a) for a in arguments], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)


def test_run_leaves_notebooks_tables_figures_and_a_page(tmp_path):
    done = call("mla-lab", "run", "--out", "here", *SMALL, "-p", "arch", "gfx950", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip().splitlines()[-1])
    assert page == tmp_path / "here" / "index.html"
    html = page.read_text()
    for path in runs.find(None):
        assert (tmp_path / "here" / path.name).is_file() and f'href="{path.name}"' in html and path.stem in html
        folder = tmp_path / "here" / path.stem
        tables = sorted(folder.glob("*.parquet"))
        assert len(tables) >= 2 and len(list(folder.glob("*.png"))) >= 1
        for table in tables:
            frame, text = pd.read_parquet(table), pd.read_csv(table.with_suffix(".csv"))
            assert len(frame) == len(text) > 0 and list(frame.columns) == list(text.columns)
            assert (frame.seed == 0).all() and frame.device.iloc[0] and "torch" in frame.versions.iloc[0]
            assert frame.command.iloc[0].startswith(f"mla-lab run {path.stem} -p arch gfx950")
        assert not list(folder.glob(".*")), "nothing half written"
        assert html.count("data:image/png;base64,") >= 8
    sweep = pd.read_parquet(tmp_path / "here" / "02_p_scale_sweep" / "p_scale_sweep.parquet")
    assert set(sweep.encoding) == {"e4m3fn", "e4m3fnuz"} and set(sweep.kv_splits) == {1, 8} and len(sweep) == 2 * 2 * 2 * 12
    again = call("mla-lab", "run", "--out", "here", cwd=tmp_path)
    assert again.returncode == 2 and "not an empty folder" in again.stderr


def test_papermill_by_hand_from_any_folder(tmp_path):
    done = call("papermill", ROOT / "notebooks" / "02_p_scale_sweep.ipynb", "out.ipynb", "-p", "arch", "gfx942", "-p", "p_scale", "64", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out.ipynb").read_text()
    assert "gfx942 with e4m3fnuz, P scale 64; 2 inputs" in text
    assert [p.name for p in tmp_path.iterdir()] == ["out.ipynb"]


@pytest.mark.parametrize("arguments, message", [
    ("run 01 -p p_scal 64", "-p p_scal: not a parameter of 01_fnuz_underflow; accepted: arch, encoding, p_scale"),
    ("run nothing", "notebook: got 'nothing'; accepted: 01_fnuz_underflow, 02_p_scale_sweep, 03_error_budget, 04_recipes, 05_cache_formats, 06_kernel_inspector, or a path"),
    ("run -p kv_split 4", "-p kv_split: not a parameter of any notebook; accepted: arch, encoding, p_scale"),
])
def test_what_mla_lab_refuses_before_anything_starts(arguments, message, tmp_path):
    done = call("mla-lab", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2 and message in " ".join(done.stderr.split()) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("given, message", [
    ({"arch": "gfx90a"}, "arch: got 'gfx90a'; accepted: gfx942, gfx950, sm_90"),
    ({"p_scale": 0}, "p_scale: got 0; accepted: a number from 2^-64 to 2^64"),
    ({"p_scale": "much"}, "p_scale: got 'much'; accepted: a number from 2^-64 to 2^64"),
    ({"encoding": "e5m2"}, "encoding: got 'e5m2'; accepted: None (the arch's), e4m3fnuz, e4m3fn"),
    ({"inputs": "normal,gauss"}, "inputs: got 'gauss'; accepted: normal, peaky, dominant_key, ones, heavy_tailed, sink, uniform, large_scale, small_scale, indexed, minilm_alice"),
    ({"inputs": "/nowhere/at_all.safetensors"}, "capture: got '/nowhere/at_all.safetensors', which is no file"),
    ({"inputs": "minilm_alice:17"}, "layer: got 17; accepted for minilm_alice.safetensors: 0, 1, 2, 3, 4, 5"),
    ({"inputs": "normal,peaky,normal"}, "inputs: got 'normal,peaky,normal'; accepted: each name once"),
    ({"tokens": 10**7}, "tokens, heads, kv_lora_rank, topk: got 10000000, 16, 512, 2048, which take about"),
    ({"inputs": "dominant_key", "topk": 1}, "topk: got 1 for dominant_key; accepted: 2 or more"),
    ({"inputs": "dominant_key", "kv_lora_rank": 2}, "kv_lora_rank: got 2 for dominant_key; accepted: 4"),
    ({"inputs": "ones"}, "qk_rope_head_dim: got 0; accepted: 1 or more"),
    ({"inputs": ""}, "inputs: got ''; accepted: names with commas between them"),
    ({"topk": 0}, "topk: got 0; accepted: an integer of 1 or more"),
    ({"topk": "all"}, "topk: got 'all'; accepted: an integer of 1 or more"),
    ({"tokens": 1.5}, "tokens: got 1.5; accepted: an integer of 1 or more"),
    ({"kv_lora_rank": 500}, "kv_lora_rank: got 500; accepted: a power of two"),
    ({"kv_lora_rank": 2048}, "kv_lora_rank: got 2048 .*would fit"),
    ({"seed": -1}, "seed: got -1; accepted: an integer of 0 or more"),
    ({"kv_splits": 0}, "kv_splits: got 0; accepted: an integer of 1 or more"),
])
def test_a_parameter_that_makes_no_sense_is_one_line(given, message):
    import re

    with pytest.raises(notebook.ParameterError) as caught:
        notebook.Parameters(**{"arch": "gfx942", **given})
    line = str(caught.value)
    assert "\n" not in line and (re.search(message, line) or message in line)
    assert caught.value._render_traceback_() == [f"ParameterError: {line}"]


@pytest.mark.parametrize("given, message", [
    ({"arch": "gfx90a"}, "arch: got 'gfx90a'; accepted: gfx942, gfx950, gfx1250, sm_90"),
    ({"kernel": "flash"}, "kernel: got 'flash'; accepted: None, portable, cdna"),
    ({"block_k": "32,48"}, "block_k: got '32,48'; accepted: powers of two of 16 or more"),
    ({"block_k": ""}, "block_k: got ''; accepted"),
    ({"num_warps": "four"}, "num_warps: got 'four'; accepted: powers of two of 1 or more"),
    ({"kv_lora_rank": 500}, "kv_lora_rank: got 500; accepted: a power of two of 16 or more"),
    ({"qk_rope_head_dim": -1}, "qk_rope_head_dim: got -1; accepted: a power of two, or 0"),
])
def test_a_compile_parameter_that_makes_no_sense_is_one_line(given, message):
    usual = dict(arch="gfx942", kernel=None, block_k="32,64", num_warps="4", kv_lora_rank=512, qk_rope_head_dim=0)
    with pytest.raises(notebook.ParameterError) as caught:
        notebook.CompileParameters(**usual | given)
    assert message in str(caught.value)
    assert len(notebook.CompileParameters(**usual).points) == 6


def test_recipes_by_name():
    assert list(notebook.recipes("fp8; two-term Q")) == ["fp8", "two-term Q"] and len(notebook.recipes("all")) == 15
    assert notebook.recipes("all", 64.0)["fp8"].p_scale == 64 and notebook.recipes("all", 64.0)["fp8, P scale 1"].p_scale == 1
    with pytest.raises(notebook.ParameterError, match="recipes: got 'fp4'; accepted: all, or names with semicolons"):
        notebook.recipes("fp8; fp4")


def test_a_notebook_with_such_a_parameter_stops_in_its_first_cells(tmp_path):
    done = call("mla-lab", "run", "01", "-p", "arch", "gfx90a", "--out", "here", cwd=tmp_path)
    assert done.returncode == 1
    assert "01_fnuz_underflow failed: ParameterError: arch: got 'gfx90a'; accepted: gfx942, gfx950, sm_90" in done.stderr
    executed = nbformat.read(tmp_path / "here" / "01_fnuz_underflow.ipynb", as_version=4)
    errors = [(i, o) for i, cell in enumerate(executed.cells) if cell.cell_type == "code" for o in cell.outputs if o.output_type == "error"]
    assert len(errors) == 1 and len(errors[0][1].traceback) == 1
    # papermill adds a cell for the injected parameters and two that point at the error
    assert errors[0][0] <= 6
    assert "Failed: ParameterError: arch: got &#39;gfx90a&#39;" in (tmp_path / "here" / "index.html").read_text()


def write_notebook(path, *cells):
    notebook_ = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook_.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook_, path)
    return path


def test_a_kernel_that_dies_does_not_stop_the_others(tmp_path):
    dies = write_notebook(tmp_path / "dies.ipynb", "print('before')", "import os; os._exit(7)", "print('after')")
    lives = write_notebook(tmp_path / "lives.ipynb", "print('alive')")
    outcomes = runs.execute([dies, lives], {}, tmp_path / "out")
    page = runs.write_page(tmp_path / "out", outcomes)
    assert "Kernel" in outcomes[0].error and "died" in outcomes[0].error.lower() and outcomes[1].error is None
    assert "before" in outcomes[0].notebook.read_text() and "alive" in outcomes[1].notebook.read_text()
    assert "Failed: " in page.read_text()


def test_two_runs_in_the_same_second_have_folders_of_their_own(tmp_path):
    assert len({runs.new_folder(tmp_path) for _ in range(5)}) == 5


def test_a_benchmark_row_that_cannot_be_says_why(monkeypatch):
    from mla_lab import bench
    from mla_lab.inputs import Shape

    shapes = [Shape(tokens=1, heads=2, topk=32, slots=64, kv_lora_rank=rank, qk_rope_head_dim=0) for rank in (64, 1024)]
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    frame = bench.run(1, "test", chosen=[bench.Case("small", "decode", shape) for shape in shapes])
    assert frame[["cache", "recipe"]].drop_duplicates().values.tolist() == [["bf16", "bf16"]] + [["fp8_scalar", name] for name in bench.RECIPES["fp8_scalar"]]
    assert frame.error.isna().tolist() == [True] * 5 + [False] * 5 and (frame.median_us[:5] > 0).all()
    assert "would fit" in frame.error.iloc[5] and frame.kv_lora_rank.iloc[5] == 1024
    with pytest.raises(ValueError, match="only: got 'prefill', which is in none of the descriptions"):
        bench.run(1, "test", only="prefill", chosen=[bench.Case("small", "decode", shapes[0])])


def test_a_benchmark_counts_bytes_and_operations():
    """GLM-5.3-Flash TP4, 16K tokens: 32 GiB of bf16 rows, 275 + 275 GMAC; an fp8 row is half, what is not the cache stays."""
    from mla_lab import bench
    from mla_lab.inputs import Shape

    shape = Shape(tokens=16384, heads=16, topk=2048, slots=16384, qk_rope_head_dim=0)
    rest = 16384 * (2048 * 4 + 16 * (2 * 512 + 2 * 512))
    assert bench.gathered_bytes(shape, 1024) == 2**35 + rest and bench.gathered_bytes(shape, 512) == 2**34 + rest
    assert bench.operations(shape) == 4 * 16384 * 16 * 2048 * 512


@pytest.mark.parametrize("text, value", [("64", 64), ("0.5", 0.5), ("1e-3", 1e-3), ("None", None), ("gfx942", "gfx942"), ("True", True), ("true", "true"), ("a:b", "a:b")])
def test_values_are_read_as_papermill_reads_them(text, value):
    assert runs.read_parameters([("key", text)]) == {"key": value}
