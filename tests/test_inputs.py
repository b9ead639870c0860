"""Inputs: what each name promises, and that the capture is the model's own attention."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mla_lab import inputs, reference
from mla_lab.inputs import Shape

CAPTURE = Path(__file__).parents[1] / "data" / "inputs" / "minilm_alice.safetensors"
SMALL = Shape(tokens=2, heads=3, topk=256, slots=600)


def scores(made):
    rows = made.rows[made.kv_indices.long()].view(made.q.shape[0], -1, made.rows.shape[1])
    return torch.einsum("chr,ckr->chk", made.q.float(), rows) * made.softmax_scale


@pytest.mark.parametrize("name", inputs.SYNTHETIC)
def test_the_seed_decides(name):
    shape = Shape(tokens=2, heads=3, topk=256, slots=600, qk_rope_head_dim=16)
    one, again, other = inputs.make(name, shape, 5), inputs.make(name, shape, 5), inputs.make(name, shape, 6)
    for field in ("q", "rows", "kv_indptr", "kv_indices"):
        assert torch.equal(getattr(one, field), getattr(again, field))
    assert name == "ones" or not torch.equal(one.q, other.q)
    assert one.q.dtype == torch.bfloat16 and one.rows.shape == (600, 528)
    lists = one.kv_indices.view(2, 256)
    assert all(row.unique().numel() == 256 and 0 <= row.min() and row.max() < 600 for row in lists)


def test_normal_scores_are_standard_normal():
    s = scores(inputs.normal(Shape(tokens=4)))
    assert abs(s.std() - 1) < 0.05 and abs(s.mean()) < 0.05


def test_peaky_has_peaks():
    made = inputs.peaky(Shape(tokens=2), peaks=8, margin=6.0)
    top = scores(made).topk(9, -1).values
    assert made.about == {"peaks": 8, "margin": 6.0}
    assert (top[..., 0] > 5).all() and (top[..., 7].mean() - top[..., 8].mean()) > 1


@pytest.mark.parametrize("position", ["first", "last", "random"])
def test_dominant_key_has_its_margin_and_its_tail_a_fifth(position):
    made = inputs.dominant_key(Shape(tokens=2), margin=9.0, position=position)
    s = scores(made)
    where = s.argmax(-1)
    assert (made.kv_indices.view(2, -1).gather(1, where) == 0).all()
    if position != "random":
        assert (where == (0 if position == "first" else 2047)).all()
    others = s.sort(-1, descending=True).values[..., 1:]
    margins = s.amax(-1, keepdim=True) - others
    torch.testing.assert_close(margins.mean(), torch.tensor(9.0), rtol=0, atol=0.05)
    share = 1 - s.softmax(-1).amax(-1)
    assert abs(made.about["tail_share"] - 0.2017) < 1e-4
    torch.testing.assert_close(share, torch.full_like(share, made.about["tail_share"]), rtol=0, atol=0.01)


def test_the_dominant_keys_tail_carries_the_part_of_the_output_that_it_says():
    for asked in (None, 0.2):
        made = inputs.dominant_key(Shape(tokens=1), output_part=asked)
        whole, _ = reference.sparse_mla(made.q, made.rows.bfloat16(), made.kv_indptr, made.kv_indices, made.softmax_scale)
        values = made.rows.clone()
        values[0] = 0  # the weights stay what they were: only what the dominant key adds is gone
        weights = scores(made).softmax(-1)
        tail = weights @ values[made.kv_indices.long()]
        part = tail.norm() / whole.norm()
        assert abs(part - made.about["output_part"]) < 0.01 and (asked is None or made.about["output_part"] == pytest.approx(asked))


def test_dominant_keys_rows_are_of_equal_length_where_the_margin_is_longer_than_a_row_would_be():
    made = inputs.dominant_key(Shape(tokens=1, kv_lora_rank=16, topk=64, slots=100), margin=9.0)  # sqrt(16) < 9
    lengths = made.rows.norm(dim=-1)
    assert abs(lengths[0] - 9.0) < 1e-4 and abs(lengths[1:].mean() - 9.0) < 0.1
    s = scores(made)
    torch.testing.assert_close((s[..., :1] - s[..., 1:]).mean(), torch.tensor(9.0), rtol=0, atol=0.05)


def test_heavy_tailed_has_outlier_channels_and_scores_of_rms_1():
    made = inputs.heavy_tailed(Shape(tokens=4))
    rms = made.rows.square().mean(0).sqrt().sort().values
    assert (rms[-5:] > 8).all() and rms[-6] < 2 and abs(rms[:-5].mean() - 1) < 0.1
    assert abs(scores(made).square().mean().sqrt() - 1) < 0.3
    assert float(made.rows.abs().max() / made.rows.square().mean().sqrt()) > 12  # as in the MiniLM layers


def test_a_sink_takes_the_mass_and_is_short():
    made = inputs.sink(Shape(tokens=2))
    p = scores(made).softmax(-1)
    assert (made.kv_indices.view(2, -1)[:, 0] == 0).all()
    assert ((p[..., 0] > 0.6) & (p[..., 0] < 0.8)).all()
    assert abs(made.rows[0].norm() - 2.0) < 1e-4 and made.rows[1:].norm(dim=-1).min() > 18


def test_uniform_weighs_all_keys_alike():
    p = scores(inputs.uniform(Shape(tokens=2))).softmax(-1)
    assert p.max() < 1.15 / 2048 and p.min() > 0.85 / 2048


@pytest.mark.parametrize("make, factor", [(inputs.large_scale, 3e4), (inputs.small_scale, 3e-5)])
def test_scales_leave_the_scores_alone(make, factor):
    made, plain = make(Shape(tokens=1)), inputs.normal(Shape(tokens=1))
    torch.testing.assert_close(made.rows, plain.rows * factor)
    torch.testing.assert_close(scores(made), scores(plain), rtol=1e-4, atol=1e-4)


def test_indexed_keys_are_the_best_and_shared_by_neighbours():
    made = inputs.indexed(Shape(tokens=4))
    lists = made.kv_indices.view(4, -1)
    assert (lists.diff(dim=-1) > 0).all()  # in the text's order
    every = torch.einsum("chr,sr->chs", made.q.float(), made.rows).clamp_min(0).sum(1)
    for row, score in zip(lists, every):
        rest = torch.ones(8192, dtype=torch.bool)
        rest[row.long()] = False
        assert score[row.long()].min() > score[rest].max() * 0.99  # bf16 queries against the f32 ones that chose
    shared = [len(set(a.tolist()) & set(b.tolist())) / 2048 for a, b in zip(lists, lists[1:])]
    assert made.about["shared"] == pytest.approx(sum(shared) / 3) and made.about["shared"] > 0.7  # a random choice: 0.25


def test_ones_is_one_whatever_the_weights():
    made = inputs.ones(Shape(tokens=1, heads=2, qk_rope_head_dim=64, topk=64, slots=100), margin=7.0)
    out, lse = reference.sparse_mla(made.q, made.rows.bfloat16(), made.kv_indptr, made.kv_indices, made.softmax_scale)
    torch.testing.assert_close(out, torch.ones_like(out))
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, 1 + 63 * 2.718281828**-7))


@pytest.mark.parametrize("layer", range(6))
def test_the_capture_reproduces_the_models_own_attention(layer):
    """Attention over the capture, through W_v, is what the model's layer gave in f32.

    What is left is the capture's own bf16: of queries, latents and W_v (each 2^-9 / sqrt(3) = 0.11% of a value, and
    more of a score where large terms cancel); 0.19% to 0.36% in all. A head mixed up, a wrong softmax scale or a dropped b_v are 10% and more.
    """
    made = inputs.load_capture(CAPTURE, layer)
    stored = load_file(CAPTURE)
    out, _ = reference.sparse_mla(made.q, made.rows.bfloat16(), made.kv_indptr, made.kv_indices, made.softmax_scale)
    assert (out[..., 384:] == 0).all()
    got = torch.einsum("chw,hdw->chd", out[..., :384], stored[f"{layer}.w_v"].float()) + stored[f"{layer}.b_v"]
    want = stored[f"{layer}.output"]
    assert (got - want).norm() / want.norm() < 0.006


def test_the_capture_says_what_it_is_and_is_small():
    made = inputs.load_capture(CAPTURE, 0)
    assert CAPTURE.stat().st_size < 6e6
    assert made.q.shape == (24, 12, 512) and made.rows.shape == (512, 512) and made.kv_lora_rank == 512
    assert "MiniLM" in made.about["model"] and "Alice" in made.about["text"] and made.softmax_scale == 32**-0.5


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="input: got 'gauss'; accepted: normal, peaky, dominant_key, ones, heavy_tailed"):
        inputs.make("gauss")
    with pytest.raises(ValueError, match="layer: got 9; accepted for minilm_alice.safetensors: 0, 1, 2"):
        inputs.load_capture(CAPTURE, 9)
    with pytest.raises(ValueError, match="capture: got .*nowhere.*, which is no file"):
        inputs.load_capture(tmp_path / "nowhere.safetensors", 0)
    (tmp_path / "broken.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(ValueError, match="capture: got .*broken.*, which is no safetensors file"):
        inputs.load_capture(tmp_path / "broken.safetensors", 0)
    with pytest.raises(ValueError, match="topk: got 10 with 5 slots"):
        Shape(topk=10, slots=5)
    with pytest.raises(ValueError, match="tokens: got 0; accepted: an integer of 1 or more"):
        Shape(tokens=0)
    with pytest.raises(ValueError, match="margin: got -1"):
        inputs.peaky(SMALL, margin=-1)
    with pytest.raises(ValueError, match="length: got 0; accepted"):
        inputs.sink(SMALL, length=0)
    with pytest.raises(ValueError, match="memory: got 1; accepted: a number from 0 to below 1"):
        inputs.indexed(SMALL, memory=1)
    with pytest.raises(ValueError, match="position: got 'middle'"):
        inputs.dominant_key(SMALL, position="middle")
    with pytest.raises(ValueError, match="qk_rope_head_dim: got 0; accepted: 1 or more"):
        inputs.ones(SMALL)
