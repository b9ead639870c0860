"""Runs the notebooks with their default parameters and stores the outputs in them, without what changes from run to run.

    python tools/execute_notebooks.py [notebooks/01_fnuz_underflow.ipynb ...]
"""

import base64
import io
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from normalise_notebooks import normalise, text
from PIL import Image
from tqdm import tqdm

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def small(png: str) -> str:
    """A base64 PNG with 128 colours, of which a figure has fewer than it has shades: half the bytes or less."""
    out = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def main(paths):
    for path in tqdm(paths, desc="notebooks"):
        notebook = nbformat.read(path, as_version=4)
        NotebookClient(notebook, kernel_name="python3", record_timing=False, resources={"metadata": {"path": str(path.parent)}}).execute()
        for cell in normalise(notebook).cells:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = small(output.data["image/png"])
        path.write_text(text(notebook))


if __name__ == "__main__":
    main([Path(p) for p in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")))
