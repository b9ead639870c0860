"""A sweep's grid, read from YAML and held against the notebook's own parameters before anything starts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from mla_lab import runs

KEYS = ("notebook", "parameters", "together", "where", "minutes", "memory_gib", "gpu")
TYPES = {"str": (str, "a text"), "int": (int, "a whole number"), "float": ((int, float), "a number"), "bool": (bool, "true or false")}
LARGEST = 100_000
"""Points. A mistyped range should not fill a disk."""


class GridError(ValueError):
    """A grid that cannot be run: one line with the key, what came and what is accepted."""


@dataclass(frozen=True)
class Grid:
    """notebook: a path. points: one dict of parameters per run. minutes, memory_gib: each run's limits, or None. gpu: each
    run asks for one GPU."""

    name: str
    notebook: Path
    points: tuple[dict, ...]
    minutes: float | None = 60.0
    memory_gib: float | None = None
    gpu: bool = False

    @property
    def varied(self) -> list[str]:
        """The parameters that are not the same in every point."""
        return [k for k in self.points[0] if len({repr(p[k]) for p in self.points}) > 1]


def read(path: Path) -> Grid:
    """The grid in a YAML file:

        notebook: 02_p_scale_sweep          # a name, a number or a path
        parameters:                         # a value, or a list of them: the product of all lists
          arch: [gfx942, gfx950]
          seed: [0, 1, 2]
        together:                           # optional: parameters that go together, one more factor of the product
          - {inputs: normal, topk: 256}
          - {inputs: peaky, topk: 2048}
        where: arch == "gfx950" or seed < 2 # optional: a condition on a point, as pandas' query reads it; or a list of them
        minutes: 10                         # optional: each run's time limit, 60 where it is left out
        memory_gib: 4                       # optional: the limit of each run's resident memory, over its processes
        gpu: true                           # optional: each run asks Dask for the resource GPU=1

    Raises GridError, one line, for whatever cannot be run.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise GridError(f"grid: got {path}, which cannot be read ({error}); accepted: a YAML file") from None
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise GridError(f"grid: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict) or "notebook" not in given:
        raise GridError(f"grid: {path} names no notebook; accepted: a mapping with {', '.join(KEYS)}")
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise GridError(f"{unknown[0]}: not a key of a grid; accepted: {', '.join(KEYS)}")
    try:
        notebook = runs.find(str(given["notebook"]))
    except ValueError as error:
        raise GridError(str(error)) from None
    known = runs.parameters_of(notebook[0])
    points = _points(given, known)
    limits = {key: given.get(key, default) for key, default in (("minutes", 60.0), ("memory_gib", None))}
    for key, value in limits.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise GridError(f"{key}: got {value!r}; accepted: a number above 0, or nothing")
    if not isinstance(given.get("gpu", False), bool):
        raise GridError(f"gpu: got {given['gpu']!r}; accepted: true or false")
    return Grid(path.stem, notebook[0].resolve(), tuple(points), gpu=given.get("gpu", False), **limits)


def _points(given, known):
    parameters, together = given.get("parameters") or {}, given.get("together")
    if not isinstance(parameters, dict):
        raise GridError(f"parameters: got {parameters!r}; accepted: a mapping of names to values or lists of them")
    if together is not None and (not isinstance(together, list) or not all(isinstance(t, dict) for t in together)):
        raise GridError(f"together: got {together!r}; accepted: a list of mappings")
    factors = []
    for name, values in parameters.items():
        values = values if isinstance(values, list) else [values]
        if not values:
            raise GridError(f"parameters: {name} is an empty list, so that nothing would run; accepted: a value, or a list with one or more")
        factors.append([{name: value} for value in values])
    if together is not None:
        if not together:
            raise GridError("together: an empty list, so that nothing would run; accepted: a list of mappings, or no such key")
        if any(set(t) != set(together[0]) for t in together):
            raise GridError(f"together: its mappings differ in their names; accepted: {', '.join(map(str, together[0]))} in each")
        twice = [name for name in together[0] if name in parameters]
        if twice:
            raise GridError(f"together: {twice[0]} is under parameters too; accepted: in one of the two")
        factors.append(together)
    for factor in factors:
        for choice in factor:
            for name, value in choice.items():
                _check(name, value, known)
    size = 1
    for factor in factors:
        size *= len(factor)
    if size > LARGEST:
        raise GridError(f"parameters: a product of {size:,} points; accepted: up to {LARGEST:,}")
    points = [{k: v for choice in chosen for k, v in choice.items()} for chosen in itertools.product(*factors)]
    where = given.get("where")
    if where is not None:
        points = _where(points, where if isinstance(where, list) else [where])
        if not points:
            raise GridError(f"where: got {where!r}, which no point meets; accepted: a condition that leaves one or more")
    if len({repr(p) for p in points}) < len(points):
        twice = next(p for i, p in enumerate(points) if p in points[:i])
        raise GridError(f"parameters: the point {twice} comes twice; accepted: each once")
    return points


def _check(name, value, known):
    if name == "out":
        raise GridError("out: each run has a folder of its own in the sweep's; accepted: the other parameters")
    if name not in known:
        raise GridError(f"{name}: not a parameter of the notebook; accepted: {', '.join(k for k in known if k != 'out')}")
    if value is None and known[name]["default"] == "None":
        return
    kind, what = TYPES.get(known[name]["inferred_type_name"], (object, "anything"))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool and kind is not object):
        hint = " (YAML reads 1e-3 as a text, 1.0e-3 as a number)" if isinstance(value, str) and "number" in what else ""
        raise GridError(f"{name}: got {value!r}; accepted: {what}{' or nothing' if known[name]['default'] == 'None' else ''}{hint}")


def _where(points, conditions):
    frame = pd.DataFrame(points).astype(object)
    for condition in conditions:
        try:
            # engine python: numexpr, where it is installed, knows no texts.
            frame = frame.query(str(condition), engine="python")
        except Exception as error:
            raise GridError(f"where: got {condition!r} ({type(error).__name__}: {' '.join(str(error).split())}); accepted: a condition on {', '.join(map(str, points[0]))}") from None
    return [points[i] for i in frame.index]
