"""Values that the codec tests share."""

import numpy as np

from mla_lab import formats


def sample_f32():
    """2^24 f32 values: random bit patterns, and dense neighbourhoods of every code, tie and edge of each encoding."""
    rng = np.random.default_rng(0)
    edges = [0.0, np.inf, np.nan]
    for fmt in formats.FORMATS.values():
        values = np.array([v for v in (fmt.value(c) for c in range(128)) if np.isfinite(v)])
        beyond = 2 * values[-1] - values[-2]
        grid = np.append(values, beyond)
        edges += [*grid, *((grid[1:] + grid[:-1]) / 2)]
    centres = np.array(edges, np.float32).view(np.uint32).astype(np.int64)
    near = np.clip(centres[:, None] + np.arange(-4, 5), 0, 0x7FFFFFFF).astype(np.uint32).ravel()
    near = np.concatenate([near, near | 0x80000000])
    uniform = rng.integers(0, 2**32, 2**23, dtype=np.uint32)
    # Random patterns are mostly outside fp8's range: the rest lies within it, 2^-20 to 2^17, and both signs.
    inside = np.float32(2.0) ** rng.uniform(-20, 17, 2**24 - 2**23 - near.size).astype(np.float32)
    inside = inside * rng.choice(np.array([-1, 1], np.float32), inside.size)
    out = np.concatenate([near, uniform, inside.view(np.uint32)]).view(np.float32)
    assert out.size == 2**24
    return out
