"""Does this device's kernel do what the emulator says? The first thing to run on a new GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from tqdm import tqdm

from mla_lab import cache, metrics, portable, sparse_mla_fwd, study
from mla_lab.arch import Profile
from mla_lab.inputs import Inputs
from mla_lab.recipe import Recipe

LARGEST_APART = 2e-3
"""Relative L2 between kernel and emulator. They round at the same places, so that only the order of f32 sums is left: now
and then an output or a P on the other side of a rounding. Seen: 1.2e-4. A missed or wrong rounding: 1e-2 and more."""


def runs_in_kernel(recipe: Recipe) -> bool:
    try:
        portable.check_recipe(recipe)
    except ValueError:
        return False
    return True


def check(every: Sequence[Inputs], profile: Profile, recipes: Mapping[str, Recipe], device) -> pd.DataFrame:
    """The Triton kernel on `device` beside the emulator, over an fp8_scalar cache, split-K off; recipes that it runs only.

    Columns: arch, input, recipe, kernel_error and emulated_error (relative L2 against f32 attention over the same cache),
    apart (between the two), ok (apart below LARGEST_APART).
    """
    rows = []
    todo = [(made, name, recipe) for made in every for name, recipe in recipes.items() if runs_in_kernel(recipe)]
    for made, name, recipe in tqdm(todo, desc="kernel and emulator", leave=False):
        on = made.to(device)
        packed = cache.pack_fp8_scalar(on.rows, profile.encoding)
        right = study.truth(on, packed, profile)
        outs = [sparse_mla_fwd(on.q, packed.buffer, on.kv_indptr, on.kv_indices, on.softmax_scale, kv_scale=packed.scale, kv_lora_rank=on.kv_lora_rank,
                               qk_rope_head_dim=on.qk_rope_head_dim, kv_splits=1, arch=profile.name, recipe=recipe, backend=backend)[0]
                for backend in ("triton", "emulate")]
        apart = metrics.relative_l2(*outs)
        rows.append(dict(arch=profile.name, input=made.name, recipe=name, kernel_error=metrics.relative_l2(outs[0], right),
                         emulated_error=metrics.relative_l2(outs[1], right), apart=apart, ok=apart < LARGEST_APART))
    return pd.DataFrame(rows)
