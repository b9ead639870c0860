"""Rewrites notebooks so that a diff shows what changed: the same metadata, cell ids by position, no progress bars' remains.

    python tools/normalise_notebooks.py [--check] [notebooks/01_fnuz_underflow.ipynb ...]

With --check nothing is written, and what would change is named (exit code 1).
"""

import sys
from pathlib import Path

import nbformat

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}


def normalise(notebook):
    """Changes a notebook in place: what an editor or a run leaves in it goes, tags stay."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for i, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{i:02d}"
        cell.metadata = nbformat.from_dict({"tags": list(cell.metadata["tags"])} if cell.metadata.get("tags") else {})
        cell.source = cell.source.rstrip()
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            count += 1
            cell.execution_count = count
        cell.outputs = [o for o in cell.outputs if not (o.output_type == "stream" and o.name == "stderr")]
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = cell.execution_count
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def text(notebook) -> str:
    return nbformat.writes(notebook, version=nbformat.NO_CONVERT) + "\n"


def main(arguments):
    check = "--check" in arguments
    paths = [Path(a) for a in arguments if a != "--check"] or sorted(NOTEBOOKS.glob("*.ipynb"))
    changed = []
    for path in paths:
        before = path.read_text()
        after = text(normalise(nbformat.reads(before, as_version=4)))
        if after != before:
            changed.append(path.name)
            if not check:
                path.write_text(after)
    if changed:
        print(("not normalised: " if check else "normalised: ") + ", ".join(changed))
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
