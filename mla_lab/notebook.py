"""What every notebook needs: parameters refused with one clear line, and results written with where they came from."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import shlex
from pathlib import Path

import pandas as pd
import torch
import triton

import mla_lab
from mla_lab.arch import check_fits, get_profile, tile_bytes
from mla_lab.inputs import Shape
from mla_lab.recipe import NAMED, Recipe, check_scale
from mla_lab.study import E4M3, make_inputs, with_encoding

# Notebook tables are read whole.
pd.set_option("display.max_colwidth", 240, "display.width", 160, "display.max_columns", 30)


class ParameterError(ValueError):
    """A parameter that makes no sense. Jupyter shows its message alone: the way to it says nothing more."""

    def _render_traceback_(self):
        return [f"ParameterError: {self}"]


LARGEST_INPUTS = 8 << 30
"""Bytes. A notebook is meant for a laptop; a larger study calls the package."""


class Parameters:
    """The parameters that notebooks share, checked, with what follows from them.

    profile: of `arch`, reading `encoding` where that is given. p_scale: given, or the profile's. inputs: a
    comma-separated list of names for study.make_inputs. others: a notebook's own parameters, recorded only. Raises ParameterError with the name, what came, what is accepted.
    """

    def __init__(self, *, arch, encoding=None, p_scale=None, tokens=4, heads=16, kv_lora_rank=None, qk_rope_head_dim=0, topk=2048, seed=0, inputs="normal", kv_splits=None, **others):
        self.given = dict(arch=arch, encoding=encoding, p_scale=p_scale, tokens=tokens, heads=heads, kv_lora_rank=kv_lora_rank,
                          topk=topk, seed=seed, inputs=inputs, kv_splits=kv_splits, **others)
        kv_lora_rank = 512 if kv_lora_rank is None else kv_lora_rank
        kv_splits = 1 if kv_splits is None else kv_splits
        try:
            self.profile = get_profile(arch)
            if encoding is not None and encoding not in E4M3:
                raise ValueError(f"encoding: got {encoding!r}; accepted: None (the arch's), {', '.join(E4M3)}")
            self.profile = with_encoding(self.profile, encoding)
            self.encoding = self.profile.encoding
            self.p_scale = p_scale if p_scale is not None else self.profile.p_scale
            check_scale(self.p_scale)
            if isinstance(kv_splits, bool) or not isinstance(kv_splits, int) or kv_splits < 1:
                raise ValueError(f"kv_splits: got {kv_splits!r}; accepted: an integer of 1 or more")
            if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
                raise ValueError(f"seed: got {seed!r}; accepted: an integer of 0 or more")
            if isinstance(kv_lora_rank, int) and kv_lora_rank > 0 and kv_lora_rank & (kv_lora_rank - 1):
                raise ValueError(f"kv_lora_rank: got {kv_lora_rank}; accepted: a power of two")
            self.seed = seed
            self.shape = Shape(tokens=tokens, heads=heads, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, topk=topk, slots=max(8192, topk) if isinstance(topk, int) else 8192)
            if not isinstance(inputs, str) or not inputs.strip():
                raise ValueError(f"inputs: got {inputs!r}; accepted: names with commas between them")
            for dots in ("bf16", "fp8"):
                check_fits(self.profile, dots, kv_lora_rank, qk_rope_head_dim)
            names = [name.strip() for name in inputs.split(",")]
            if len(set(names)) < len(names):
                raise ValueError(f"inputs: got {inputs!r}; accepted: each name once")
            size = 4 * (self.shape.slots * self.shape.width + self.shape.tokens * (self.shape.heads * self.shape.width + self.shape.slots)) * len(names)
            if size > LARGEST_INPUTS:
                raise ValueError(f"tokens, heads, kv_lora_rank, topk: got {tokens}, {heads}, {kv_lora_rank}, {topk}, which take about {size / 2**30:.0f} GiB of inputs; accepted: up to {LARGEST_INPUTS >> 30} GiB")
            self.inputs = make_inputs(names, self.shape, seed)
        except ValueError as error:
            raise ParameterError(error) from None


def device_name() -> str:
    """The GPU where there is one, else the processor."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return f"CPU ({names[0] if names else platform.machine()}, {os.cpu_count()} cores)"


def versions() -> str:
    return f"mla_lab {mla_lab.__version__}, torch {torch.__version__}, triton {triton.__version__}, python {platform.python_version()}"


class CompileParameters:
    """The parameters of the kernel inspector, checked: points (compile.grid of them) and seed, which nothing here needs.

    block_k, num_warps: numbers with commas between them. Raises ParameterError with the name, what came, what is accepted.
    """

    seed = 0

    def __init__(self, *, arch, kernel, block_k, num_warps, kv_lora_rank, qk_rope_head_dim):
        from mla_lab import compile as compiler  # Triton's compilers, which no other notebook needs

        self.given = dict(arch=arch, kernel=kernel, block_k=block_k, num_warps=num_warps, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
        if arch not in compiler.TARGETS:
            raise ParameterError(f"arch: got {arch!r}; accepted: {', '.join(compiler.TARGETS)}")
        if kernel not in (None, "portable", "cdna"):
            raise ParameterError(f"kernel: got {kernel!r}; accepted: None, portable, cdna")
        for name, value in (("kv_lora_rank", kv_lora_rank), ("qk_rope_head_dim", qk_rope_head_dim)):
            if isinstance(value, bool) or not isinstance(value, int) or value < (16 if name == "kv_lora_rank" else 0) or (value & (value - 1)):
                raise ParameterError(f"{name}: got {value!r}; accepted: a power of two" + (" of 16 or more" if name == "kv_lora_rank" else ", or 0"))
        self.block_ks, self.num_warps = _numbers("block_k", block_k, 16), _numbers("num_warps", num_warps, 1)
        self.kv_lora_rank, self.qk_rope_head_dim = kv_lora_rank, qk_rope_head_dim
        self.points = compiler.grid([arch], kernel, self.block_ks, self.num_warps, [qk_rope_head_dim], kv_lora_rank)

    def tile_model(self) -> pd.DataFrame:
        """arch.tile_bytes for both dots over the tiles, and where they fit: columns dots, block_k, bytes, gfx942, gfx950."""
        rows = []
        for dots in ("bf16", "fp8"):
            for block_k in self.block_ks:
                size = tile_bytes(dots, block_k, self.kv_lora_rank, self.qk_rope_head_dim)
                rows.append(dict(dots=dots, block_k=block_k, bytes=size, **{name: "fits" if size <= get_profile(name).shared_memory else "does not fit" for name in ("gfx942", "gfx950")}))
        return pd.DataFrame(rows)


def _numbers(name, text, least):
    try:
        numbers = sorted({int(part) for part in str(text).split(",")})
    except ValueError:
        numbers = []
    if not numbers or any(n < least or n & (n - 1) for n in numbers):
        raise ParameterError(f"{name}: got {text!r}; accepted: powers of two of {least} or more, commas between them")
    return numbers


def recipes(names: str, p_scale: float | None = None) -> dict[str, Recipe]:
    """Recipes by their names in recipe.NAMED, semicolons between them; "all" for all. p_scale, where given, takes the
    place of the "largest" and of the profile's. Raises ParameterError for another name."""
    chosen = list(NAMED) if names == "all" else [name.strip() for name in names.split(";")] if isinstance(names, str) else [names]
    for name in chosen:
        if name not in NAMED:
            raise ParameterError(f"recipes: got {name!r}; accepted: all, or names with semicolons between them: {'; '.join(NAMED)}")
    made = {name: NAMED[name] for name in chosen}
    if p_scale is not None:
        made = {name: dataclasses.replace(r, p_scale=p_scale) if r.p != "bf16" and r.p_scale in (None, "largest") else r for name, r in made.items()}
    return made


class Results:
    """Writes a notebook's tables (Parquet, CSV beside it) and figures (PNG) into `out`; nowhere where that is None.

    Every table gets the columns device, versions, seed and command. A file is there whole or not at all.
    """

    def __init__(self, notebook: str, out: str | None, parameters: Parameters | CompileParameters):
        if out is not None and not isinstance(out, str):
            raise ParameterError(f"out: got {out!r}; accepted: None, or a folder's path")
        self.folder = Path(out) if out else None
        if self.folder:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ParameterError(f"out: got {out!r}, which cannot be made a folder ({error}); accepted: None, or a folder's path") from None
        given = " ".join(f"-p {k} {shlex.quote(str(v))}" for k, v in parameters.given.items() if v is not None)
        self.provenance = dict(device=device_name(), versions=versions(), seed=parameters.seed, command=f"mla-lab run {notebook} {given}")

    def table(self, name: str, frame: pd.DataFrame) -> None:
        if self.folder:
            write_table(frame.assign(**self.provenance), self.folder / name)

    def figure(self, name: str, figure) -> None:
        if self.folder:
            _whole(self.folder / f"{name}.png", lambda path: figure.savefig(path, format="png", dpi=150))

    def findings(self, **values) -> pd.DataFrame:
        """The notebook's last word, as a table: what was found, by name."""
        frame = pd.DataFrame(dict(found=list(values), value=[v if isinstance(v, str) else f"{v:.4g}" for v in values.values()]))
        # A sweep compares runs by the numbers themselves.
        self.table("findings", frame.assign(number=[math.nan if isinstance(v, str) else float(v) for v in values.values()]))
        return frame


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """`path`.parquet and `path`.csv."""
    _whole(path.with_suffix(".parquet"), lambda p: frame.to_parquet(p, index=False))
    _whole(path.with_suffix(".csv"), lambda p: frame.to_csv(p, index=False))


def _whole(path, write):
    unfinished = path.with_name(f".{path.name}.part")
    write(unfinished)
    os.replace(unfinished, path)


def percent(frame: pd.DataFrame, digits: int = 1) -> pd.DataFrame:
    """A frame of numbers as percentages for reading: rounded so that the last bits of a sum do not show."""
    return frame.map(lambda v: "" if pd.isna(v) else f"{100 * v:.{digits}f}%")
