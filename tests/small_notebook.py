"""A notebook that takes as long as its kernel takes to start, for tests of what runs notebooks."""

import nbformat

PARAMETERS = "seed: int = 0\nscale: float = 1.0\nseconds: float = 0.0\nfail: bool = False\nword: str = None\nout: str = None  # a folder"
BODY = """import time
import pyarrow as pa
import pyarrow.parquet
time.sleep(seconds)
assert not fail, f"seed {seed} is bad"
found = {"scaled": scale * seed, "doubled": 2.0 * seed}
pa.parquet.write_table(pa.table({"found": list(found), "value": [str(v) for v in found.values()], "number": list(found.values())}), f"{out}/findings.parquet")
pa.parquet.write_table(pa.table({"n": range(3), "scaled": [scale * seed * n for n in range(3)], "seed": [seed] * 3, "word": [word or "none"] * 3}), f"{out}/steps.parquet")
print(f"seed {seed}")"""


def write(path, body=BODY, parameters=PARAMETERS):
    cells = [nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}), nbformat.v4.new_code_cell(body)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
    nbformat.write(notebook, path)
    return path
