"""Does this device's kernel do what the emulator says? The first thing to run on a new GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from tqdm import tqdm

from mla_lab import cache, cdna, metrics, portable, sparse_mla_fwd, study
from mla_lab.arch import Profile
from mla_lab.inputs import Inputs
from mla_lab.recipe import Recipe

LARGEST_APART = 2e-3
"""Relative L2 between kernel and emulator. They round at the same places, so that only the order of f32 sums is left: now
and then an output or a P on the other side of a rounding. Seen: 4e-4, and 2e-3 where a thousand p's lie at the flush and
tip together. A missed or wrong rounding: 1e-2 and more."""


KERNELS = ("triton", "cdna")


def runs_in(kernel: str, made: Inputs, recipe: Recipe) -> bool:
    """Whether a kernel takes a recipe over an fp8_scalar cache of this input."""
    try:
        portable.check_recipe(recipe)
        if kernel == "cdna":
            cdna.check(recipe, made.kv_lora_rank, made.qk_rope_head_dim, "fp8_scalar", False)
    except ValueError:
        return False
    return True


def check(every: Sequence[Inputs], profile: Profile, recipes: Mapping[str, Recipe], device, kernels: Sequence[str] = KERNELS) -> pd.DataFrame:
    """Each kernel on `device` beside the emulator, over an fp8_scalar cache, split-K off; recipes that it runs only.

    Columns: arch, input, recipe, kernel (backend of sparse_mla_fwd), kernel_error and emulated_error (relative L2 against
    f32 attention over the same cache), apart (between the two), ok (apart below LARGEST_APART).
    """
    rows = []
    todo = [(made, name, recipe) for made in every for name, recipe in recipes.items()]
    for made, name, recipe in tqdm(todo, desc="kernel and emulator", leave=False):
        chosen = [kernel for kernel in kernels if runs_in(kernel, made, recipe)]
        if not chosen:
            continue
        on = made.to(device)
        packed = cache.pack_fp8_scalar(on.rows, profile.encoding)
        right = study.truth(on, packed, profile)

        def run(backend):
            return sparse_mla_fwd(on.q, packed.buffer, on.kv_indptr, on.kv_indices, on.softmax_scale, kv_scale=packed.scale, kv_lora_rank=on.kv_lora_rank,
                                  qk_rope_head_dim=on.qk_rope_head_dim, kv_splits=1, arch=profile.name, recipe=recipe, backend=backend)[0]

        emulated = run("emulate")
        for kernel in chosen:
            out = run(kernel)
            apart = metrics.relative_l2(out, emulated)
            rows.append(dict(arch=profile.name, input=made.name, recipe=name, kernel=kernel, kernel_error=metrics.relative_l2(out, right),
                             emulated_error=metrics.relative_l2(emulated, right), apart=apart, ok=apart < LARGEST_APART))
    return pd.DataFrame(rows)
