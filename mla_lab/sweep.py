"""Sweeps: every point of a grid is one papermill run in a process of its own, given out by Dask, and written whole.

A sweep's folder:

    sweep.json              the grid, and each run's digest and parameters, in the grid's order
    runs/DIGEST/            one run: notebook.ipynb as executed, run.json (status, reason, seconds, host), its tables and figures
    results/                the tables of all runs (mla_lab.results reads them)

A run is made in a hidden folder beside its place, synced to the disk and renamed: it is there whole or not at all. What is
done is known by the run's digest (notebook, parameters, the files that they name, package, versions) and is not done again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import nbformat
import psutil
import yaml
from tqdm import tqdm

from mla_lab import collect
from mla_lab.grid import Grid

PACKAGE = Path(__file__).resolve().parent
LIBRARIES = ("torch", "triton", "numpy", "pandas", "papermill", "matplotlib")
POLL = 0.1
"""Seconds between two looks at a run."""
RECONNECTS = 20
"""Rounds in which nothing ends before a sweep gives up on a scheduler that it keeps losing."""
_STOP = ".stop"
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class SweepError(Exception):
    """Why a sweep cannot start or go on, in one line. What is done stays done."""


@dataclass(frozen=True)
class Job:
    """One run, as a worker gets it. folder: the sweep's. minutes, memory_gib: limits, or None."""

    digest: str
    notebook: str
    parameters: dict
    folder: str
    cwd: str
    minutes: float | None
    memory_gib: float | None

    @property
    def place(self) -> Path:
        return Path(self.folder) / "runs" / self.digest


def digest(notebook: Path, parameters: dict) -> str:
    """16 hex digits that change with whatever may change a run's result: the notebook's code, its parameters and the
    contents of the files that they name, the package's source and data, and the libraries' versions."""
    code = [cell.source for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
    files = []
    for value in parameters.values():
        for part in str(value).split(",") if isinstance(value, str) else ():
            path = Path(part.strip().rsplit(":", 1)[0] if ":" in part else part.strip())
            if part.strip() and path.is_file():
                files.append(hashlib.sha256(path.read_bytes()).hexdigest())
    versions = [platform.python_version(), *(f"{name} {metadata.version(name)}" for name in LIBRARIES)]
    whole = json.dumps([notebook.stem, code, sorted(parameters.items()), files, _package(), versions])
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


@functools.cache
def _package():
    root = PACKAGE.parent
    found = [p for folder in (PACKAGE, root / "kernels", PACKAGE / "kernels", root / "data" / "inputs", root / "data" / "published")
             for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    of_all = hashlib.sha256()
    for path in sorted(found):
        of_all.update(str(path.relative_to(root)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return of_all.hexdigest()


def outcome(place: Path) -> dict | None:
    """What a run's folder says of it, or None."""
    try:
        return json.loads((place / "run.json").read_text())
    except (OSError, ValueError):
        return None


def execute(job: Job) -> dict:
    """Run one notebook here: its outcome, also stored in its place. status: done, failed or stopped.

    Raises OSError where the folder cannot be written: that is no fault of the run's.
    """
    known = outcome(job.place)
    if known and known["status"] == "done":  # another worker's, whose answer was lost on the way
        return known
    part = job.place.with_name(f".{job.digest}.{uuid.uuid4().hex[:8]}.part")
    started = time.monotonic()
    try:
        part.mkdir(parents=True)
        given = dict(job.parameters)
        if "out" not in given:
            given["out"] = str(part)
        (part / "parameters.yaml").write_text(yaml.safe_dump(given, sort_keys=False))
        for _ in range(2):
            status, error = _papermill(job, part)
            # Several kernels that start at once can pick the same port; the second try is alone.
            if error is None or "before replying to kernel_info" not in error:
                break
        if error and f"[Errno {errno.ENOSPC}]" in error:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))
        if status == "stopped":
            shutil.rmtree(part, ignore_errors=True)
            return dict(digest=job.digest, status=status, error=error)
        for name in ("parameters.yaml",) + (("papermill.log",) if status == "done" else ()):
            (part / name).unlink(missing_ok=True)
        record = dict(digest=job.digest, status=status, error=error, parameters=job.parameters, seconds=round(time.monotonic() - started, 3),
                      host=socket.gethostname(), finished=datetime.now(UTC).isoformat(timespec="seconds"))
        return _publish(part, job.place, record)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _papermill(job, part):
    """(status, reason) of one papermill process, watched over its time, its memory and the sweep's stop."""
    command = [sys.executable, "-m", "papermill", job.notebook, str(part / "notebook.ipynb"), "-k", "python3", "-f", str(part / "parameters.yaml"), "--progress-bar"]
    say = _cells_said()
    with open(part / "papermill.log", "wb") as log:
        process = subprocess.Popen(command, cwd=job.cwd if Path(job.cwd).is_dir() else None, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(),
                                   start_new_session=True, preexec_fn=_die_with_parent)
    deadline = time.monotonic() + 60 * job.minutes if job.minutes else float("inf")
    try:
        while True:
            try:
                process.wait(POLL)
                break
            except subprocess.TimeoutExpired:
                pass
            say(part / "papermill.log")
            if time.monotonic() > deadline:
                return "failed", f"time: over the limit of {job.minutes:g} minutes"
            if job.memory_gib and (used := _resident(process.pid)) > job.memory_gib * 2**30:
                return "failed", f"memory: {used / 2**30:.2f} GiB, over the limit of {job.memory_gib:g} GiB"
            if (Path(job.folder) / _STOP).exists():
                return "stopped", "stopped"
    finally:
        _end(process)
    if process.returncode == 0:
        return "done", None
    with open(part / ".room", "wb") as probe:  # a full disk leaves no reason behind, not even in the log: OSError
        probe.write(bytes(1 << 16))
    (part / ".room").unlink()
    return "failed", _reason(part, process.returncode)


def _environment():
    """Each run's threads: its share of the cores. More, and the runs wait for each other."""
    environment = dict(os.environ)
    workers = 1
    try:
        from distributed import get_worker

        workers = get_worker().state.nthreads
    except ValueError:
        pass
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
    return environment


def _die_with_parent():
    """A worker that is killed takes its runs along, so that no orphan goes on beside the run's next try. The kernel ends
    by itself when papermill is gone."""
    if _libc is not None:
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _resident(pid):
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            total += process.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def _end(process):
    """papermill and its kernel, where they still run."""
    try:
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        family = []
    if process.poll() is None:
        for member in family:
            try:
                member.kill()
            except psutil.NoSuchProcess:
                pass
        process.wait()


def _cells_said():
    """A function of papermill's log that tells whoever listens how many cells have ended since it was last called."""
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return lambda log: None
    seen = 0

    def say(log):
        nonlocal seen
        found = re.findall(rb"(\d+)/\d+ \[", log.read_bytes())
        if found and int(found[-1]) > seen:
            worker.log_event("mla-lab-cells", int(found[-1]) - seen)
            seen = int(found[-1])

    return say


def _reason(part, code):
    """One line: the notebook's own error with its cell, else the last line that papermill wrote."""
    try:
        cells = nbformat.read(part / "notebook.ipynb", as_version=4).cells
    except Exception:
        cells = []
    for cell in cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"{output.ename}: {output.evalue}".strip().splitlines()[0]
    lines = [line.strip() for line in re.split(r"[\r\n]", (part / "papermill.log").read_text(errors="replace")) if line.strip()]
    return lines[-1][:500] if lines else f"papermill ended with {code}"


def _publish(part, place, record):
    """The finished folder into its place, synced: an earlier failure there gives way, an earlier success stays."""
    (part / "run.json").write_text(json.dumps(record, indent=1))
    for path in part.rglob("*"):
        if path.is_file():
            _sync(path)
    _sync(part)
    while True:
        try:
            os.rename(part, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            there = outcome(place)
            if there and there["status"] == "done":
                shutil.rmtree(part, ignore_errors=True)
                return there
            old = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.part")
            try:
                os.rename(place, old)
            except FileNotFoundError:
                continue
            shutil.rmtree(old, ignore_errors=True)
        else:
            _sync(place.parent)
            return record


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(grid: Grid, folder: Path, jobs: int | None = None, scheduler: str | None = None, fresh: bool = False, show: bool = False) -> list[dict]:
    """Run what of the grid is not done in `folder` yet, and gather everything into folder/results. The outcomes, in order.

    jobs: runs at a time on this machine, one per core where it is None. scheduler: a Dask scheduler's address, whose workers
    have this package and this file system. fresh: do everything again. show: progress bars. Ctrl-C and SIGTERM end the runs
    in progress, keep what is done and raise KeyboardInterrupt. Raises SweepError where the sweep cannot start or go on.
    """
    folder = folder.absolute()
    _prepare(folder)
    with _alone(folder):
        _clear(folder)  # of a sweep that was killed
        (folder / _STOP).unlink(missing_ok=True)
        every = [Job(digest(grid.notebook, point), str(grid.notebook), point, str(folder), os.getcwd(), grid.minutes, grid.memory_gib) for point in grid.points]
        try:
            _describe(folder, grid, every)
            if fresh:
                for job in every:
                    shutil.rmtree(job.place, ignore_errors=True)
            pending = {job.digest: job for job in every if (outcome(job.place) or {}).get("status") != "done"}
            if pending:
                _run(pending, len(every), folder, grid, jobs, scheduler, show)
                _clear(folder)  # of workers that were lost
            collect.gather(folder)
        except OSError as error:
            raise SweepError(f"{folder}: {error.strerror or error}; nothing that is done is lost: make room or access and start the same sweep again") from None
        return [found for job in every if (found := outcome(job.place))]


def _clear(folder):
    for rest in (folder / "runs").glob(".*.part"):
        shutil.rmtree(rest, ignore_errors=True)


def _prepare(folder):
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not (folder / "sweep.json").exists())):
        raise SweepError(f"--out: got {folder}, which is neither empty nor a sweep's; accepted: a new or empty folder, or one to resume")
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        probe = folder / f".{uuid.uuid4().hex[:8]}"
        probe.write_bytes(bytes(4096))
        probe.unlink()
    except OSError as error:
        raise SweepError(f"--out: got {folder}, which cannot be written ({error.strerror}); accepted: a folder that can") from None


@contextmanager
def _alone(folder):
    """The kernel gives the lock back when its holder dies, however it dies."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SweepError(f"--out: another sweep runs in {folder}; accepted: another folder, or this one when it has ended") from None
        yield


def _describe(folder, grid, every):
    about = dict(name=grid.name, notebook=str(grid.notebook), varied=grid.varied, minutes=grid.minutes, memory_gib=grid.memory_gib, gpu=grid.gpu,
                 runs=[dict(digest=job.digest, parameters=job.parameters) for job in every])
    part = folder / ".sweep.json.part"
    part.write_text(json.dumps(about, indent=1))
    _sync(part)
    os.replace(part, folder / "sweep.json")


def _run(pending, total, folder, grid, jobs, scheduler, show):
    from distributed import as_completed

    quiet = 0
    cells = len(nbformat.read(grid.notebook, as_version=4).cells) + 1  # papermill adds one for the parameters
    with _signals(), tqdm(total=total, initial=total - len(pending), desc=grid.name, unit="run", disable=not show) as bar, tqdm(
            total=len(pending) * cells, desc="cells", unit="cell", leave=False, disable=not (show and sys.stderr.isatty())) as cell_bar:
        failed = 0
        try:
            for _ in range(10**6):
                if not pending:
                    return
                with _client(scheduler, jobs or os.cpu_count() or 1, grid.gpu) as client:
                    if not cell_bar.disable:
                        client.subscribe_topic("mla-lab-cells", lambda event: cell_bar.update(event[1]))
                    futures = {client.submit(execute, job, key=f"mla-lab-{name}-{uuid.uuid4().hex[:8]}", pure=False, resources={"GPU": 1} if grid.gpu else None): name
                               for name, job in pending.items()}
                    ended = 0
                    for future in as_completed(futures):
                        name = futures[future]
                        if future.status == "finished":
                            result = future.result()
                        elif future.status == "error":
                            error = future.exception()
                            if isinstance(error, OSError) and error.errno:
                                raise error
                            result = _mark(pending[name], f"{type(error).__name__}: {error}".splitlines()[0])
                        else:  # cancelled or lost with the scheduler's connection
                            continue
                        if result["status"] == "stopped":
                            continue
                        failed += result["status"] == "failed"
                        del pending[name]
                        ended += 1
                        bar.set_postfix(dict(failed=failed) if failed else {}, refresh=False)
                        bar.update()
                quiet = 0 if ended else quiet + 1
                if pending and quiet > RECONNECTS:
                    raise SweepError(f"--scheduler: {scheduler} was lost {quiet} times and nothing ended in between; {len(pending)} of {total} runs are left")
        except BaseException:
            # Runs look at this file: it reaches them in this process and on other machines.
            try:
                (folder / _STOP).touch()
            except OSError:
                pass
            raise


def _mark(job, error):
    part = job.place.with_name(f".{job.digest}.{uuid.uuid4().hex[:8]}.part")
    part.mkdir(parents=True)
    return _publish(part, job.place, dict(digest=job.digest, status="failed", error=error, parameters=job.parameters, seconds=None, host=None,
                                          finished=datetime.now(UTC).isoformat(timespec="seconds")))


@contextmanager
def _signals():
    """SIGTERM as Ctrl-C, while a sweep runs."""
    def interrupt(number, frame):
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _client(scheduler, jobs, gpu):
    import logging

    import dask
    from distributed import Client, LocalCluster

    if scheduler is None:
        resources = None
        if gpu:
            import torch

            if not torch.cuda.device_count():
                raise SweepError("gpu: got true, and there is no GPU here; accepted: --scheduler with workers that offer GPU=1 (dask worker --resources GPU=1)")
            resources = {"GPU": torch.cuda.device_count()}
        # Each run is a process already, so that the worker can be a thread of this one: nothing outlives it.
        logging.getLogger("distributed").setLevel(logging.ERROR)
        with dask.config.set({"distributed.worker.memory.target": False, "distributed.worker.memory.spill": False, "distributed.worker.memory.pause": False}), LocalCluster(
                n_workers=1, threads_per_worker=jobs, processes=False, dashboard_address="127.0.0.1:0", resources=resources) as cluster, Client(cluster) as client:
            yield client
            return
    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
    last = None
    for _ in range(RECONNECTS):
        try:
            client = Client(scheduler, timeout=10)
            break
        except (OSError, TimeoutError) as error:
            last = error
            time.sleep(1)
        except ValueError as error:
            raise SweepError(f"--scheduler: got {scheduler} ({error}); accepted: an address such as tcp://host:8786") from None
    else:
        raise SweepError(f"--scheduler: {scheduler} does not answer ({' '.join(str(last).split())})")
    try:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if gpu and not any(w.get("resources", {}).get("GPU") for w in workers):
            raise SweepError(f"gpu: got true, and no worker of {scheduler} offers it; accepted: workers started with --resources GPU=1")
        yield client
    finally:
        client.close(timeout=5)
