"""What a sweep costs beside bare papermill calls, and whether being killed changes its results.

    python tools/sweep_under_fire.py [RUNS] [FOLDER]

RUNS small runs, as many at a time as there are cores: bare papermill calls (a tenth as many), an undisturbed sweep, and one whose
processes get SIGKILL twice at random moments and that is started again. Prints one JSON line; exits with 1 if a table differs.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import small_notebook
from mla_lab import results

BIN = Path(sys.executable).parent


def main(count, folder):
    folder.mkdir(parents=True, exist_ok=True)
    notebook = small_notebook.write(folder / "small.ipynb")
    grid = folder / "grid.yaml"
    grid.write_text(f"notebook: {notebook}\nparameters:\n  seed: {list(range(count // 2))}\n  scale: [1.0, 2.5]\n")
    cores = os.cpu_count()
    bare = max(cores, count // 10)

    def call(number):
        place = folder / "bare" / str(number)
        place.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "papermill", notebook, place / "out.ipynb", "-k", "python3", "-p", "seed", str(number), "-p", "out", place],
                       check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})

    began = time.monotonic()
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(call, range(bare)))
    per_call = (time.monotonic() - began) * cores / bare

    command = [BIN / "mla-lab", "sweep", grid, "--out"]
    began = time.monotonic()
    subprocess.run([*command, folder / "calm"], check=True)
    calm = time.monotonic() - began
    per_run = calm * cores / count

    chance, kills = random.Random(0), []
    while True:
        process = subprocess.Popen([*command, folder / "fire"], start_new_session=True)
        try:
            process.wait(chance.uniform(0.15, 0.6) * calm if len(kills) < 2 else None)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills.append(len(list((folder / "fire" / "runs").glob("[!.]*"))))
    equal = True
    for table in (None, "steps"):
        try:
            pd.testing.assert_frame_equal(results(folder / "calm", table), results(folder / "fire", table), check_exact=True)
        except AssertionError as error:
            print(error, file=sys.stderr)
            equal = False
    print(json.dumps(dict(runs=count, cores=cores, papermill_s=round(per_call, 3), sweep_s=round(per_run, 3), overhead=round(per_run / per_call - 1, 4), sweep_total_s=round(calm, 1),
                          done_when_killed=kills, tables_equal=equal, exit=process.returncode)))
    return 0 if equal and process.returncode == 0 else 1


if __name__ == "__main__":
    where = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp())
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200, where))
