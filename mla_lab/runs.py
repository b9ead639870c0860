"""Notebook runs: find, check the parameters, execute with papermill, and put the results on one page."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import nbformat
import pandas as pd
import papermill
from jinja2 import Environment
from markupsafe import Markup
from papermill.exceptions import PapermillExecutionError

from mla_lab.notebook import device_name, versions

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@dataclass
class Outcome:
    """One executed notebook. error: one line, or None."""

    name: str
    notebook: Path
    results: Path
    parameters: dict = field(default_factory=dict)
    error: str | None = None


def find(name: str | None) -> list[Path]:
    """The notebook of a name ("01_fnuz_underflow"), a number ("01", "1") or a path; all of them for None."""
    every = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
    if not every:
        raise ValueError(f"notebooks: none in {NOTEBOOKS}; accepted: a checkout (pip install -e .), which has them")
    if name is None:
        return every
    if name.endswith(".ipynb") and Path(name).is_file():
        return [Path(name)]
    found = [p for p in every if name in (p.stem, p.name, p.stem.partition("_")[2]) or (name.isdigit() and p.stem.startswith(f"{int(name):02d}_"))]
    if not found:
        raise ValueError(f"notebook: got {name!r}; accepted: {', '.join(p.stem for p in every)}, or a path")
    return found


def read_parameters(pairs: list[tuple[str, str]]) -> dict:
    """(("p_scale", "64"), ...) to {"p_scale": 64}, as papermill's own -p reads values: True, False, None, numbers, else text."""
    return {key: _read_value(text) for key, text in pairs}


def _read_value(text):
    words = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parameters_of(path: Path) -> dict:
    """The parameters that a notebook declares, as papermill reads its tagged cell: {name: {default, help, ...}}."""
    return papermill.inspect_notebook(str(path))


def check_parameters(notebooks: list[Path], parameters: dict) -> None:
    """ValueError for a parameter that none of the notebooks has: papermill only warns, and goes on with the default.

    One that some have goes to those.
    """
    if "out" in parameters and len(notebooks) > 1:
        raise ValueError("-p out: got one folder for several notebooks; accepted: --out, in which each has its own")
    known = list(dict.fromkeys(key for path in notebooks for key in parameters_of(path)))
    unknown = [key for key in parameters if key not in known]
    if unknown:
        whose = notebooks[0].stem if len(notebooks) == 1 else "any notebook"
        raise ValueError(f"-p {unknown[0]}: not a parameter of {whose}; accepted: {', '.join(known)}")


def new_folder(parent: Path) -> Path:
    """parent/<time>, made here; with a number behind it where another run started in the same second."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H.%M.%S")
    number = 0
    while True:
        number += 1
        folder = parent / (stamp if number == 1 else f"{stamp}_{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            pass


def check_folder(folder: Path) -> None:
    """ValueError for a folder that holds something: a run must not mix with another."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out: got {folder}, which is not an empty folder; accepted: a new or an empty folder")


def execute(notebooks: list[Path], parameters: dict, folder: Path) -> list[Outcome]:
    """Each notebook into folder/NAME.ipynb, its results into folder/NAME/. One that fails does not stop the others."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for path in notebooks:
        results = folder.resolve() / path.stem
        known = parameters_of(path)
        given = {key: value for key, value in parameters.items() if key in known}
        if "out" in known and "out" not in given:
            given["out"] = str(results)
        outcome = Outcome(path.stem, folder / path.name, Path(given.get("out") or results), given)
        print(path.stem, flush=True)
        try:
            papermill.execute_notebook(str(path), str(outcome.notebook), parameters=given, kernel_name="python3", progress_bar=True)
        except PapermillExecutionError as error:
            # papermill's own message is the whole traceback; its last line says what happened.
            outcome.error = f"{error.ename}: {error.evalue}"
        except Exception as error:  # a kernel that died, an unreadable notebook: the others go on
            outcome.error = f"{type(error).__name__}: {error}".splitlines()[0]
        outcomes.append(outcome)
    return outcomes


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mla-lab: {{ title }}</title>
<style>
  body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1.2rem; max-width: 120rem; color: #1a1a1a; }
  main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 1.5rem; align-items: start; }
  section { border: 1px solid #ccc; border-radius: 6px; padding: 0 1rem 1rem; min-width: 0; }
  img { max-width: 100%; height: auto; }
  figure { margin: 0.8rem 0; }
  .table { overflow-x: auto; max-height: 26rem; }
  table { border-collapse: collapse; font-size: 13px; margin: 0.4rem 0; }
  th, td { border-bottom: 1px solid #ddd; padding: 0.15rem 0.6rem; text-align: right; }
  td:first-child, th:first-child { text-align: left; }
  .failed { background: #fbe3d6; padding: 0.6rem; border-radius: 4px; }
  .about { color: #555; font-size: 13px; overflow-wrap: anywhere; }
  code { font-size: 12.5px; }
</style>
<h1>mla-lab: {{ title }}</h1>
<p class="about">{{ device }}. {{ versions }}.</p>
<main>
{% for run in runs %}
<section>
  <h2>{{ run.heading }}</h2>
  <p class="about">{{ run.name }}{% for k, v in run.parameters.items() %} &middot; {{ k }} = {{ v }}{% endfor %}<br>
  <a href="{{ run.link }}">the executed notebook</a>{% for file in run.files %} &middot; <a href="{{ file }}">{{ file.split("/")[-1] }}</a>{% endfor %}</p>
  {% if run.error %}<p class="failed">Failed: {{ run.error }}</p>{% endif %}
  {% if run.findings %}<h3>Found</h3><div class="table">{{ run.findings }}</div>{% endif %}
  {% for figure in run.figures %}<figure><img alt="{{ figure.name }}" src="data:image/png;base64,{{ figure.data }}"></figure>
  {% endfor %}
  {% for table in run.tables %}<details><summary>{{ table.name }} ({{ table.rows }} rows)</summary><div class="table">{{ table.html }}</div>
  <p class="about">Made by <code>{{ table.command }}</code></p></details>
  {% endfor %}
</section>
{% endfor %}
</main>
</html>
"""

_PROVENANCE = ["device", "versions", "seed", "command"]


def write_page(folder: Path, outcomes: list[Outcome]) -> Path:
    """folder/index.html: the runs side by side, with figures inlined, tables, what failed, and links to the files."""
    page = Environment(autoescape=True).from_string(PAGE)
    path = folder / "index.html"
    path.write_text(page.render(title=folder.resolve().name, device=device_name(), versions=versions(), runs=[_section(o, folder) for o in outcomes]))
    return path


def _section(outcome: Outcome, folder: Path) -> dict:
    def table_html(frame):
        return Markup(frame.drop(columns=_PROVENANCE, errors="ignore").to_html(index=False, float_format=lambda v: f"{v:.5g}", border=0))

    def relative(path):
        return path.resolve().relative_to(folder.resolve()).as_posix() if path.resolve().is_relative_to(folder.resolve()) else path.resolve().as_uri()

    tables, findings = [], None
    for path in sorted(outcome.results.glob("*.parquet"), key=lambda p: p.stat().st_mtime_ns):
        frame = pd.read_parquet(path)
        if path.stem == "findings":
            findings = table_html(frame.drop(columns="number"))
        else:
            tables.append(dict(name=path.stem, rows=len(frame), html=table_html(frame), command=frame.command.iloc[0] if "command" in frame else ""))
    figures = [dict(name=p.stem, data=base64.b64encode(p.read_bytes()).decode()) for p in sorted(outcome.results.glob("*.png"), key=lambda p: p.stat().st_mtime_ns)]
    return dict(
        name=outcome.name, heading=_heading(outcome.notebook) or outcome.name, parameters={k: v for k, v in outcome.parameters.items() if k != "out"},
        error=outcome.error, findings=findings, tables=tables, figures=figures, link=relative(outcome.notebook),
        files=[relative(p) for p in sorted(outcome.results.glob("*.csv"))],
    )


def _heading(notebook: Path) -> str | None:
    """The first markdown heading of an executed notebook."""
    if not notebook.is_file():
        return None
    for cell in nbformat.read(notebook, as_version=4).cells:
        found = re.match(r"#\s+(.+)", cell.source) if cell.cell_type == "markdown" else None
        if found:
            return found[1].strip()
    return None
