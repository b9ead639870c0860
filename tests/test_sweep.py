"""Sweeps: grids that are refused, runs that fail, kills, full disks and lost workers. Each run is a real papermill call."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pandas as pd
import psutil
import pytest

import small_notebook
from mla_lab import grid as grids
from mla_lab import results
from mla_lab import sweep as sweeps

CLI = [sys.executable, "-c", "from mla_lab.cli import app; app()"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    return small_notebook.write(tmp_path_factory.mktemp("notebook") / "small.ipynb")


def write_grid(folder, notebook, rest):
    path = folder / "grid.yaml"
    path.write_text(f"notebook: {notebook}\n{rest}")
    return path


BAD = [
    ("parameters: {sed: [1]}", "sed: not a parameter of the notebook; accepted: seed, scale, seconds, fail, word"),
    ("parameters: {seed: [1, two]}", "seed: got 'two'; accepted: a whole number"),
    ("parameters: {scale: 1e-3}", r"scale: got '1e-3'; accepted: a number \(YAML reads 1e-3 as a text, 1.0e-3 as a number\)"),
    ("parameters: {seed: []}", "parameters: seed is an empty list, so that nothing would run"),
    ("parameters: {seed: [1, 1]}", "parameters: the point {'seed': 1} comes twice"),
    ("parameters: {seed: [1, 2]}\nwhere: seed > 5", "where: got 'seed > 5', which no point meets"),
    ("parameters: {seed: [1, 2]}\nwhere: sed > 5", r"where: got 'sed > 5' \(UndefinedVariableError.*accepted: a condition on seed"),
    ("parameters: {out: here}", "out: each run has a folder of its own in the sweep's"),
    ("parameters: {seed: 1}\ntogether: [{seed: 2}]", "together: seed is under parameters too"),
    ("parameters: {seed: 1}\nminutes: -1", "minutes: got -1; accepted: a number above 0"),
    ("parameter: {seed: 1}", "parameter: not a key of a grid"),
]


@pytest.mark.parametrize("rest, message", BAD, ids=[rest for rest, _ in BAD])
def test_a_bad_grid_is_one_line(tmp_path, notebook, rest, message):
    with pytest.raises(grids.GridError, match=message) as caught:
        grids.read(write_grid(tmp_path, notebook, rest))
    assert "\n" not in str(caught.value)


def test_a_notebook_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(grids.GridError, match="nowhere.ipynb") as caught:
        grids.read(write_grid(tmp_path, tmp_path / "nowhere.ipynb", "parameters: {seed: 1}"))
    assert "\n" not in str(caught.value)


def test_a_grid_multiplies_out_in_order(tmp_path, notebook):
    made = grids.read(write_grid(tmp_path, notebook, "parameters: {seed: [1, 2]}\ntogether: [{scale: 1.0, word: a}, {scale: 2.0, word: b}]\nwhere: seed == 1 or word == 'b'"))
    assert [(p["seed"], p["scale"], p["word"]) for p in made.points] == [(1, 1.0, "a"), (1, 2.0, "b"), (2, 2.0, "b")]
    assert made.varied == ["seed", "scale", "word"]


def test_what_fails_says_why_and_what_is_done_is_not_done_again(tmp_path, notebook):
    place = tmp_path / "swept"
    grid = grids.read(write_grid(tmp_path, notebook, "together: [{seed: 3}, {seed: 4, fail: true}, {seed: 5, seconds: 60.0}]\nminutes: 0.2".replace("{seed: 3}", "{seed: 3, fail: false, seconds: 0.0}")
                                 .replace("fail: true}", "fail: true, seconds: 0.0}").replace("seconds: 60.0}", "fail: false, seconds: 60.0}")))
    outcomes = sweeps.sweep(grid, place, jobs=2)
    assert [o["status"] for o in outcomes] == ["done", "failed", "failed"]
    assert outcomes[1]["error"] == "AssertionError: seed 4 is bad" and outcomes[2]["error"] == "time: over the limit of 0.2 minutes"
    kept = [place / "runs" / o["digest"] for o in outcomes]
    assert all((k / "notebook.ipynb").exists() for k in kept[:2]) and not list((place / "runs").glob(".*"))
    frame = results(place)
    assert frame.status.tolist() == ["done", "failed", "failed"] and frame.scaled[0] == 3.0 and frame.doubled[0] == 6.0 and frame.scaled[1:].isna().all()
    assert results(place, "steps").seed.tolist() == [3] * 3
    # Parquet that anything reads.
    assert duckdb.sql(f"select seed, doubled from '{place}/results/runs.parquet' where status = 'done'").fetchall() == [(3, 6.0)]
    before = (kept[0] / "run.json").stat().st_mtime_ns
    again = sweeps.sweep(grids.Grid(grid.name, grid.notebook, grid.points[:2]), place, jobs=2)
    assert [o["status"] for o in again] == ["done", "failed"] and (kept[0] / "run.json").stat().st_mtime_ns == before


def test_a_folder_with_something_else_in_it_and_one_without_results_are_refused(tmp_path, notebook):
    (tmp_path / "mine.txt").write_text("mine")
    grid = grids.Grid("g", notebook, ({"seed": 1},))
    with pytest.raises(sweeps.SweepError, match="--out: got .*, which is neither empty nor a sweep's"):
        sweeps.sweep(grid, tmp_path)
    with pytest.raises(ValueError, match="folder: got .*, which holds no sweep's results"):
        results(tmp_path)


def test_killed_twice_and_resumed_it_is_what_it_would_have_been(tmp_path, notebook):
    path = write_grid(tmp_path, notebook, "parameters: {seed: [0, 1, 2, 3], scale: [2.5]}")
    command = [*CLI, "sweep", path, "--out", tmp_path / "fire"]
    for wanted in (1, 2):
        process = subprocess.Popen(command, start_new_session=True, env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "fire" / "runs").glob("[!.]*"))) < wanted and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = [json.loads(p.read_text())["status"] for p in (tmp_path / "fire" / "runs").glob("[!.]*/run.json")]
    assert 2 <= len(done) < 4 and set(done) == {"done"}
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0 and "4 of 4 done, 0 failed" in ended.stdout, ended.stderr
    sweeps.sweep(grids.read(path), tmp_path / "calm", jobs=2)
    for table in (None, "steps"):
        pd.testing.assert_frame_equal(results(tmp_path / "fire", table), results(tmp_path / "calm", table), check_exact=True)
    assert not list((tmp_path / "fire" / "runs").glob(".*"))


def test_a_full_disk_is_one_line_and_what_is_done_stays(tmp_path, notebook):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs takes root")
    try:
        grid = grids.Grid("g", notebook, ({"seed": 1},))
        sweeps.sweep(grid, small / "swept", jobs=1)
        with open(small / "rest", "wb") as rest:
            try:
                while True:
                    rest.write(bytes(4096))
                    rest.flush()
            except OSError:
                rest.raw.close()
        with open(small / "rest", "r+b") as rest:  # room to start with, not to end with
            rest.truncate((small / "rest").stat().st_size - 12_288)
        with pytest.raises(sweeps.SweepError, match="No space left on device; nothing that is done is lost"):
            sweeps.sweep(grids.Grid("g", notebook, ({"seed": 1}, {"seed": 2})), small / "swept", jobs=1)
        (small / "rest").unlink()
        outcomes = sweeps.sweep(grids.Grid("g", notebook, ({"seed": 1}, {"seed": 2})), small / "swept", jobs=1)
        assert [o["status"] for o in outcomes] == ["done", "done"]
    finally:
        subprocess.run(["umount", "-l", small], capture_output=True)


def test_a_worker_that_is_killed_loses_nothing(tmp_path, notebook):
    """A scheduler and three workers as processes of their own on the loopback; one worker dies in the middle of a run."""
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"], [sys.executable, "-m", "distributed.cli.dask_worker"]
    address_file = tmp_path / "scheduler.json"
    processes = [subprocess.Popen([*dask[0], "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", address_file], env=ENVIRONMENT, stderr=subprocess.DEVNULL)]
    try:
        deadline = time.monotonic() + 60
        while not address_file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.5)
        address = json.loads(address_file.read_text())["address"]
        for _ in range(3):
            processes.append(subprocess.Popen([*dask[1], address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1", "--local-directory", tmp_path], env=ENVIRONMENT,
                                              stderr=subprocess.DEVNULL))
        path = write_grid(tmp_path, notebook, "parameters: {seed: [0, 1, 2, 3, 4], seconds: 2.0}")
        swept = subprocess.Popen([*CLI, "sweep", path, "--out", tmp_path / "swept", "--scheduler", address], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        victim = None
        deadline = time.monotonic() + 90
        while victim is None and time.monotonic() < deadline:
            time.sleep(0.1)
            victim = next((p for p in processes[1:] if any("papermill" in " ".join(c.cmdline()) for c in psutil.Process(p.pid).children())), None)
        assert victim is not None
        victim.kill()
        out, error = swept.communicate(timeout=240)
        assert swept.returncode == 0 and "5 of 5 done, 0 failed" in out, error
        frame = results(tmp_path / "swept")
        assert frame.seed.tolist() == [0, 1, 2, 3, 4] and set(frame.status) == {"done"} and frame.doubled.tolist() == [0, 2, 4, 6, 8]
        assert not list((tmp_path / "swept" / "runs").glob(".*"))
    finally:
        for process in processes:
            process.kill()
            process.wait()
