"""Profiles, the model of shared memory, and the split-K policy."""

from pathlib import Path

import pandas as pd
import pytest

from mla_lab import arch

PUBLISHED = Path(__file__).parents[1] / "data" / "published" / "lds_gfx942.csv"


def test_profiles_are_those_of_the_contract():
    table = {n: (p.encoding.name, p.shared_memory, p.p_scale) for n, p in arch.PROFILES.items()}
    assert table == {
        "gfx942": ("e4m3fnuz", 65_536, 128.0),
        "gfx950": ("e4m3fn", 163_840, 1.0),
        "sm_90": ("e4m3fn", 232_448, 256.0),
    }
    assert [(arch.PROFILES[a].launch(d).block_k, arch.PROFILES[a].launch(d).num_warps) for a, d in (("gfx942", "bf16"), ("gfx942", "fp8"), ("gfx950", "bf16"))] == [
        (32, 4), (64, 4), (64, 4)]
    for profile in arch.PROFILES.values():  # twice the P scale would leave the range
        assert 2 * profile.p_scale > profile.encoding.max_finite or profile.name == "gfx950"


def test_tile_bytes_are_the_published_ones_to_the_byte():
    for row in pd.read_csv(PUBLISHED).itertuples():
        assert arch.tile_bytes(row.dots, row.block_k, row.kv_lora_rank, row.qk_rope_head_dim, row.kv_row_pad_elements) == row.lds_bytes
    assert arch.tile_bytes("bf16", 32, 512, 0) == 34304 and arch.tile_bytes("fp8", 64, 512, 64) == 39936


@pytest.mark.parametrize("name", arch.PROFILES)
def test_kv_splits(name):
    profile = arch.PROFILES[name]
    choose = lambda tokens, keys, heads=16: arch.choose_kv_splits(profile, tokens, heads, keys, 64)
    assert choose(16384, 2048) == 1  # prefill fills the device by itself
    assert choose(1, 2048) == 16  # 32 tiles, two to a split
    assert choose(1, 1) == choose(1, 0) == choose(0, 0) == 1
    for tokens in (1, 2, 16, 64, 300):
        assert tokens * choose(tokens, 2048) <= max(profile.compute_units, tokens)
    assert choose(16, 2048, heads=128) <= choose(16, 2048)


def test_exactly_the_budget_passes_and_one_step_more_does_not():
    """gfx942 under bf16 dots: rope 480 makes 65,536 B; rope 481, 64 B more."""
    profile = arch.PROFILES["gfx942"]
    assert arch.tile_bytes("bf16", 32, 512, 480) == 65_536
    arch.check_fits(profile, "bf16", 512, 480)
    with pytest.raises(ValueError, match=r"tile of 32 keys under bf16 dots needs 65,600 B of gfx942's 65,536 B of shared memory; a tile of 16 keys would fit \(32,800 B\)"):
        arch.check_fits(profile, "bf16", 512, 481)
    with pytest.raises(ValueError, match=r"tile of 128 keys under fp8 dots needs 69,632 B .* a tile of 64 keys would fit \(34,816 B\)"):
        arch.check_fits(profile, "fp8", 512, 0, block_k=128)
