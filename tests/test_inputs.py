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
    with pytest.raises(ValueError, match="input: got 'gauss'; accepted: normal, peaky, dominant_key, ones"):
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
    with pytest.raises(ValueError, match="position: got 'middle'"):
        inputs.dominant_key(SMALL, position="middle")
    with pytest.raises(ValueError, match="qk_rope_head_dim: got 0; accepted: 1 or more"):
        inputs.ones(SMALL)
