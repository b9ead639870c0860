"""The results of many runs as one table each: gathered when a sweep ends, read by pandas, DuckDB or whatever reads Parquet."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd

RUNS = "runs"
_NOT_A_RESULT = ["device", "versions", "seed", "command"]


def results(folder: str | Path, table: str | None = None) -> pd.DataFrame:
    """A sweep's results as a frame.

    table None: one row per run, in the grid's order, with the columns run (its digest), the parameters, status ("done", "failed"
    or "missing"), error, and what the notebook found, each finding a column. Otherwise the notebook's table of that name, of all
    runs, with run and the parameters as columns in front; a parameter whose name the table has too is called parameter_NAME.
    The same frames lie in folder/results/*.parquet. Raises ValueError for a folder without results or a table that is not there.
    """
    place = Path(folder) / "results"
    names = sorted(p.stem for p in place.glob("*.parquet"))
    if not names:
        raise ValueError(f"folder: got {folder}, which holds no sweep's results; accepted: a folder in which mla-lab sweep has ended")
    name = RUNS if table is None else table
    if name not in names:
        raise ValueError(f"table: got {table!r}; accepted: None, {', '.join(n for n in names if n not in (RUNS, 'log'))}")
    return pd.read_parquet(place / f"{name}.parquet")


def gather(folder: Path) -> None:
    """folder/results/*.parquet from folder/runs: runs, log (what depends on when and where a run was made), and each table.

    Every file is synced and renamed into place. The same runs give the same files, in whatever order they were made.
    """
    about = json.loads((folder / "sweep.json").read_text())
    summary, log = [], []
    tables: dict[str, list[pd.DataFrame]] = {}
    for entry in about["runs"]:
        place = folder / "runs" / entry["digest"]
        try:
            said = json.loads((place / "run.json").read_text())
        except (OSError, ValueError):
            said = dict(status="missing", error=None)
        row = {"run": entry["digest"], **entry["parameters"], "status": said["status"], "error": said["error"]}
        log.append(dict(run=entry["digest"], status=said["status"], **{k: said.get(k) for k in ("seconds", "host", "finished")}))
        for path in sorted(place.glob("*.parquet")) if said["status"] == "done" else ():
            frame = pd.read_parquet(path)
            if path.stem == "findings":
                row |= {found: value if pd.isna(number) else number for found, value, number in zip(frame.found, frame.value, frame.number)}
            else:
                tables.setdefault(path.stem, []).append(_with_parameters(frame, entry))
        summary.append(row)
    place = folder / "results"
    place.mkdir(exist_ok=True)
    kept = {RUNS: _plain(pd.DataFrame(summary)), "log": pd.DataFrame(log)}
    kept |= {name: _plain(pd.concat([f for f in frames if len(f)] or frames[:1], ignore_index=True)) for name, frames in tables.items()}
    for name, frame in kept.items():
        part = place / f".{name}.part"
        frame.to_parquet(part, index=False)
        with open(part) as written:
            os.fsync(written.fileno())
        os.replace(part, place / f"{name}.parquet")
    for path in place.glob("*.parquet"):
        if path.stem not in kept:  # of an earlier grid in this folder
            path.unlink()


def _with_parameters(frame, entry):
    frame = frame.drop(columns=[c for c in _NOT_A_RESULT if c in frame])
    given = {f"parameter_{k}" if k in frame else k: v for k, v in entry["parameters"].items()}
    front = pd.DataFrame({"run": entry["digest"], **given}, index=frame.index)
    return pd.concat([front, frame], axis=1)


def _plain(frame):
    """Columns of one type each, as Parquet needs them: what is a number in one run and a text in another is a text."""
    for column in [c for c in frame if pd.api.types.is_object_dtype(frame[c])]:
        kinds = {type(v) for v in frame[column].dropna()}
        if kinds <= {int, float} and kinds and bool not in kinds:
            frame[column] = pd.to_numeric(frame[column])
        elif len(kinds) > 1:
            frame[column] = frame[column].map(lambda v: v if v is None or (isinstance(v, float) and pd.isna(v)) else str(v))
    return frame
