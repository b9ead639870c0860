"""Captures of small random models of each class, against the models' own attention."""

import json

import pytest
import torch
from click.testing import CliRunner

import tiny_models
from mla_lab import cache, capture, inputs, metrics, reference, sparse_mla_fwd
from mla_lab.cli import app

KINDS = {"glm_moe_dsa": "mla", "deepseek_v32": "mla", "glm5_next": "mla", "deepseek_v3": "mla",
         "bert": "input", "llama": "heads", "qwen3": "heads", "gpt2": "heads", "mistral": "heads"}


@pytest.fixture(scope="module", params=KINDS)
def captured(request):
    model = tiny_models.make(request.param)
    return request.param, model, capture.capture(model, tiny_models.ids(), queries=10)


def test_every_attention_layer_is_an_exact_absorbed_mla(captured):
    """f32 on both sides: the order of sums alone, 1e-7 to 1e-6. A key too many, a head mixed up or a wrong scale: 1e-1."""
    name, model, found = captured
    layers = {"glm_moe_dsa": [0, 1, 2], "deepseek_v32": [0, 1, 2], "deepseek_v3": [0, 1, 2], "glm5_next": [1, 2]}.get(name, [0, 1])  # glm5_next's layer 0 is linear attention
    assert list(found) == layers
    for layer in found.values():
        assert layer.kind == KINDS[name] and layer.error() < 1e-5
        assert layer.output.norm() > 0.1


def test_the_indexers_choice_is_kept(captured):
    """More visible tokens than top-k: only the chosen ones, and never one to come."""
    name, model, found = captured
    if KINDS[name] != "mla" or name == "deepseek_v3":
        seen = [8 if name == "mistral" and i > 7 else i + 1 for i in torch.linspace(0, 47, 10).round().int().tolist()]
        assert name == "bert" or [len(row) for row in found[0].lists] == seen  # all of the past, or its window
        return
    kept = torch.linspace(0, 47, 10).round().long().tolist()
    for layer in found.values():
        for position, chosen in zip(kept, layer.lists):
            assert len(chosen) == min(position + 1, len(chosen)) and int(chosen.max()) <= position
            assert len(chosen) < position + 1 or position < 11  # 8 chosen, and up to 3 more of an unfinished pool
    if name == "glm_moe_dsa":  # layer 1 shares layer 0's choice
        assert all(torch.equal(a, b) for a, b in zip(found[0].lists, found[1].lists))


def test_the_model_is_left_as_it_was(captured):
    name, model, _ = captured
    before = tiny_models.make(name)
    ids = tiny_models.ids()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).last_hidden_state, before(input_ids=ids).last_hidden_state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "eager" and getattr(model.config, "use_cache", None) == getattr(before.config, "use_cache", None)


def test_saved_loaded_and_attended_to(captured, tmp_path):
    """Through the file, a bf16 cache and sparse_mla_fwd: what is left is bf16 (of q, rows and w_v: 0.2 to 0.4%)."""
    name, model, found = captured
    capture.save(found, tmp_path / "c.safetensors", name, "random", "none", "none", values=True)
    assert inputs.capture_layers(tmp_path / "c.safetensors") == list(found)
    for n, layer in found.items():
        made = inputs.load_capture(tmp_path / "c.safetensors", n)
        assert made.kv_lora_rank & (made.kv_lora_rank - 1) == 0 and made.qk_rope_head_dim == layer.rope
        packed = cache.pack_bf16(made.rows)
        out, _ = sparse_mla_fwd(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale,
                                kv_lora_rank=made.kv_lora_rank, qk_rope_head_dim=made.qk_rope_head_dim)
        truth, _ = reference.sparse_mla(made.q, packed.buffer, made.kv_indptr, made.kv_indices, made.softmax_scale, kv_lora_rank=made.kv_lora_rank)
        assert metrics.relative_l2(out, truth) < 4e-3
        got = torch.einsum("chr,hvr->chv", truth[..., : layer.w_v.shape[2]], layer.w_v)
        assert metrics.relative_l2(got if layer.b_v is None else got + layer.b_v, layer.output) < 0.02


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_a_sink_or_a_cap_on_the_scores_is_refused_not_ignored(name):
    """Both are inside the model's own attention function, which is what a capture is held against."""
    with pytest.raises(ValueError, match="layer 0: got attention that is no absorbed MLA"):
        capture.capture(tiny_models.make(name), tiny_models.ids())


def test_a_layer_that_is_no_absorbed_mla_is_refused(monkeypatch):
    model = tiny_models.make("glm_moe_dsa")
    right = torch.Tensor.unique
    monkeypatch.setattr(torch.Tensor, "unique", lambda self: right(self)[1:] if self.numel() > 3 else right(self))  # a key lost
    with pytest.raises(ValueError, match="layer 0: got attention that is no absorbed MLA"):
        capture.capture(model, tiny_models.ids())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_refusals():
    model = tiny_models.make("bert")
    with pytest.raises(ValueError, match=r"layers: got \[7\]; the model has no such attention layer; captured: \[0\]"):
        capture.capture(model, tiny_models.ids(), layers=[0, 7])
    with pytest.raises(ValueError, match=r"input_ids: got shape \(2, 48\); accepted: \[1, tokens\]"):
        capture.capture(model, tiny_models.ids().repeat(2, 1))
    with pytest.raises(ValueError, match="queries: got 0"):
        capture.capture(model, tiny_models.ids(), queries=0)
    with pytest.raises(ValueError, match="kv_head: got 2; accepted: 0 to 1"):
        capture.capture(tiny_models.make("llama"), tiny_models.ids(), kv_head=2)


def test_the_command(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tiny_models.make("deepseek_v32")
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, **{str(n): n for n in range(1, 97)}}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(str(n % 90 + 3) for n in range(200)))
    out = tmp_path / "out.safetensors"
    done = CliRunner().invoke(app, ["capture", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--out", str(out), "--layers", "0,2", "--tokens", "40", "--queries", "5"])
    assert done.exit_code == 0, done.output
    assert "layer 0 (mla): 4 heads, 32 latent and 8 rope columns, 1 to 8 keys a query" in done.output
    made = inputs.load_capture(out, 2)
    assert made.q.shape == (5, 4, 40) and made.rows.shape == (40, 40) and made.about["kind"] == "mla"
    direct = capture.capture(model, torch.tensor([[n % 90 + 3 for n in range(40)]]), [2], 5)[2]
    assert torch.equal(made.q, direct.q.bfloat16()) and made.kv_indices.tolist() == torch.cat(direct.lists).tolist()
    done = CliRunner().invoke(app, ["capture", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--out", str(out), "--layers", "0,9"])
    assert done.exit_code == 2 and "layers: got [9]" in done.output
    assert str(tmp_path) not in json.dumps(dict(command=inputs.load_capture(out, 0).about))
