"""mla-lab check: the kernel against the emulator, as a command."""

import pandas as pd
from click.testing import CliRunner

from mla_lab import check, inputs, portable
from mla_lab.cli import app
from mla_lab.recipe import NAMED

SMALL = ["--inputs", "normal,sink", "--tokens", "1", "--topk", "128", "--arch", "sm_90"]


def test_every_recipe_that_the_kernel_has_agrees(tmp_path):
    done = CliRunner().invoke(app, ["check", *SMALL, "--out", str(tmp_path / "table")])
    assert done.exit_code == 0, done.output
    frame = pd.read_parquet(tmp_path / "table.parquet")
    runs = [name for name, recipe in NAMED.items() if check.runs_in("triton", inputs.normal(), recipe)]
    assert set(frame.recipe) == set(runs) and len(runs) >= 10 and len(frame) == 2 * len(runs)
    assert f"{len(frame)} of {len(frame)} agree" in done.output and (frame.apart < check.LARGEST_APART).all()
    assert (abs(frame.kernel_error - frame.emulated_error) < 0.1 * frame.emulated_error).all()


def test_a_kernel_that_rounds_otherwise_is_told(monkeypatch):
    right = portable.constants
    monkeypatch.setattr(portable, "constants", lambda *a, **k: right(*a, **k) | dict(Q_LOW=False))
    done = CliRunner().invoke(app, ["check", *SMALL, "--recipes", "two-term Q and P; bf16"])
    assert done.exit_code == 1 and "2 of 4 agree" in done.output


def test_refusals():
    done = CliRunner().invoke(app, ["check", "--recipes", "fp4"])
    assert done.exit_code == 2 and "recipes: got 'fp4'; accepted: all, or names" in done.output
    done = CliRunner().invoke(app, ["check", "--arch", "gfx90a"])
    assert done.exit_code == 2 and "arch: got 'gfx90a'" in done.output
