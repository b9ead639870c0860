"""Captures a transformers model's attention over a text as inputs for sparse_mla_fwd: every layer an exact absorbed MLA.

Three kinds of layers, told apart by what the layer has:

    mla      latent attention (glm_moe_dsa, deepseek_v32, glm5_next, deepseek_v3): the queries are absorbed through kv_b_proj,
             the rows are the latent cache's (normalised latent, rotated rope columns), and the lists are the indexer's
             top-k (where a layer has one, or shares another's), cut to what the query may see
    input    an ordinary layer whose keys and values are linear in the layer's input x, without rotary positions: with
             k = W_k x + b_k a head's score is (W_k^T q) . x plus a term that is the same for all keys, which the softmax
             drops, and its output is W_v (sum of p x) + b_v. So x is the latent row
    heads    any other ordinary layer (rotary positions, normalised keys, fused projections): one key-value head, whose
             value is the latent part of a row and whose key, as it enters the product, the rope part

Nothing is approximated, and each layer is checked: attention over what was captured must give what the model's layer
gave. The model's code is not touched: forward hooks, and for ordinary layers an attention function of our own under
transformers' AttentionInterface. transformers is imported when this is used (pip install -e '.[capture]').
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from mla_lab import reference
from mla_lab.metrics import relative_l2

LARGEST_ERROR = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative L2 between captured attention and the model's own. f32: the order of sums, seen below 1e-5. 16 bits: the
model rounds keys, values, scores and weights that absorption does not (bf16: 2^-9 each)."""

_INTERFACE = "mla_lab_capture"


@dataclass
class Layer:
    """One layer: q [C, H, R], rows [slots, R], w_v [H, v, rank], b_v [H, v] or None, output [C, H, v] (the model's own).

    lists: the slots that each of the C queries gathers. rope: how many of the R columns are rope columns.
    """

    kind: str
    q: torch.Tensor
    rows: torch.Tensor
    lists: list[torch.Tensor]
    rope: int
    softmax_scale: float
    w_v: torch.Tensor
    b_v: torch.Tensor | None
    output: torch.Tensor

    def error(self) -> float:
        """Relative L2 of f32 attention over q, rows and lists, taken through w_v, against the model's output."""
        rank = self.rows.shape[1] - self.rope
        indptr = torch.tensor([0, *(len(l) for l in self.lists)]).cumsum(0).to(torch.int32)
        indices = torch.cat(self.lists).to(torch.int32)
        out, _ = reference.sparse_mla(self.q.float(), self.rows.float(), indptr, indices, self.softmax_scale, kv_lora_rank=rank)
        got = torch.einsum("chr,hvr->chv", out, self.w_v.float())
        return relative_l2(got if self.b_v is None else got + self.b_v.float(), self.output)


def capture(model, input_ids: torch.Tensor, layers=None, queries: int = 24, kv_head: int = 0) -> dict[int, Layer]:
    """The attention layers of a transformers model over one text, input_ids [1, S].

    layers: their numbers (layer_idx), None for all. queries: how many tokens are kept as queries, evenly spaced. kv_head:
    which key-value head, for layers of the kind "heads". Raises ValueError for another shape, for numbers that the model
    does not have, and where a layer's captured attention is not what the layer gave.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}; accepted: [1, tokens]")
    if queries < 1:
        raise ValueError(f"queries: got {queries}; accepted: 1 or more")
    kept = torch.linspace(0, input_ids.shape[1] - 1, min(queries, input_ids.shape[1])).round().long()
    wanted = None if layers is None else set(layers)
    latent = any(hasattr(module, "kv_b_proj") for module in model.modules())
    watch = _watch_latent if latent else _watch_ordinary
    was_training, use_cache = model.training, getattr(model.config, "use_cache", None)
    model.eval()
    model.config.use_cache = False
    try:
        with watch(model, kept, wanted, kv_head) as found, torch.no_grad():
            model(input_ids=input_ids.to(next(model.parameters()).device))
    finally:
        model.train(was_training)
        model.config.use_cache = use_cache
    missing = set() if wanted is None else wanted - set(found)
    if missing or not found:
        raise ValueError(f"layers: got {sorted(missing) if missing else 'all'}; the model has no such attention layer; captured: {sorted(found)}")
    for number, layer in found.items():
        error, limit = layer.error(), LARGEST_ERROR[next(model.parameters()).dtype]
        if not error < limit:
            raise ValueError(f"layer {number}: got attention that is no absorbed MLA (relative L2 {error:.2g} against the model's own output); accepted: below {limit:g}")
    return dict(sorted(found.items()))


@contextlib.contextmanager
def _hooks():
    handles = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _watch_latent(model, kept, wanted, kv_head):
    found = {}
    with _hooks() as handles:
        for module in model.modules():
            if hasattr(module, "kv_b_proj") and (wanted is None or module.layer_idx in wanted):
                _watch_latent_layer(module, kept, found, handles)
        yield found


def _watch_latent_layer(attention, kept, found, handles):
    seen = {}
    for name in ("q_b_proj", "q_proj", "kv_a_layernorm", "kv_a_proj_with_mqa", "indexer"):
        part = getattr(attention, name, None)
        if part is not None:
            handles.append(part.register_forward_hook(lambda module, args, output, name=name: seen.__setitem__(name, output[0])))
    handles.append(attention.o_proj.register_forward_pre_hook(lambda module, args: seen.__setitem__("output", args[0][0])))
    handles.append(attention.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True))

    def collect(module, args, output):
        heads, rank, rope = module.num_heads, module.kv_lora_rank, module.qk_rope_head_dim
        nope, value = module.qk_nope_head_dim, module.v_head_dim
        tokens = seen["output"].shape[0]
        q = seen["q_b_proj" if "q_b_proj" in seen else "q_proj"].view(tokens, heads, nope + rope)
        q_rope, k_rope = q[..., nope:], seen["kv_a_proj_with_mqa"][:, None, rank:]
        if rope:
            q_rope, k_rope = _rotate(module, q_rope, k_rope, seen["position_embeddings"])
        up = module.kv_b_proj.weight.view(heads, nope + value, rank)
        absorbed = torch.einsum("chn,hnr->chr", q[kept, :, :nope].float(), up[:, :nope].float())
        chosen = seen.get("indexer", None)
        if chosen is None and seen.get("prev_topk_indices") is not None:
            chosen = seen["prev_topk_indices"][0]
        visible = [torch.arange(i + 1, device=q.device) for i in kept.tolist()]
        if chosen is not None:  # what the indexer names beyond the past, or as -1, is masked by the model
            visible = [row[(row >= 0) & (row <= i)].unique() for i, row in zip(kept.tolist(), chosen[kept])]
        found[module.layer_idx] = Layer(
            "mla", torch.cat([absorbed, q_rope[kept].float()], -1).cpu(), torch.cat([seen["kv_a_layernorm"].reshape(tokens, rank), k_rope[:, 0]], -1).float().cpu(),
            [row.cpu() for row in visible], rope, float(module.scaling), up[:, nope:].detach().float().cpu(), None,
            seen["output"].view(tokens, heads, value)[kept].float().cpu(),
        )
        seen.clear()

    handles.append(attention.register_forward_hook(collect))


def _rotate(module, q, k, position_embeddings):
    """q [S, H, rope] and k [S, 1, rope] with their positions, by the model's own function."""
    functions = vars(sys.modules[type(module).__module__])
    interleaved = getattr(module.config, "rope_interleave", True) and "apply_rotary_pos_emb_interleave" in functions
    rotate = functions["apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"]
    q, k = rotate(q[None].transpose(1, 2), k[None].transpose(1, 2), *position_embeddings)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


@contextlib.contextmanager
def _watch_ordinary(model, kept, wanted, kv_head):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    found, linears, numbers = {}, {}, {}

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):
        """The model's own eager attention, and a look at its operands: query [1, H, S, d], key and value [1, Hkv, S, d].

        Whatever else that does (a sink, a cap on the scores) is then in the output, and the layer is refused for it.
        """
        eager = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        if eager is None:
            raise ValueError(f"model: got {type(module).__name__}, whose module has no eager_attention_forward to compare with; accepted: a transformers model that has")
        number = getattr(module, "layer_idx", None)
        number = numbers.setdefault(module, len(numbers)) if number is None else number
        output, weights = eager(module, query, key, value, attention_mask, **(dict(scaling=scaling) if scaling is not None else {}), **kwargs)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        if wanted is None or number in wanted:
            seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool) if attention_mask is None else attention_mask[0, 0, :, : key.shape[2]].cpu() >= 0
            found[number] = _ordinary_layer(query[0], key[0], value[0], output[0], [row.nonzero()[:, 0] for row in seen[kept]], scaling, kept, kv_head, linears)
        linears.clear()
        return output, weights

    before = model.config._attn_implementation
    AttentionInterface.register(_INTERFACE, attend)
    AttentionMaskInterface.register(_INTERFACE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    with _hooks() as handles:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                handles.append(module.register_forward_hook(lambda module, args, output: linears.__setitem__(module, (args[0], output[0]))))
        model.set_attn_implementation(_INTERFACE)
        try:
            yield found
        finally:
            model.set_attn_implementation(before)


def _ordinary_layer(query, key, value, output, visible, scaling, kept, kv_head, linears):
    """query [H, S, d], key [Hkv, S, d], value [Hkv, S, v], output [S, H, v]."""
    heads, kv_heads = query.shape[0], key.shape[0]
    group = heads // kv_heads
    k_linear, v_linear = (_linear_of(x, linears) for x in (key, value))
    if k_linear is not None and v_linear is not None and linears[k_linear][0] is linears[v_linear][0]:
        hidden = linears[k_linear][0][0].float()
        w_k, w_v = (l.weight.detach().float().view(kv_heads, -1, hidden.shape[1]).repeat_interleave(group, 0) for l in (k_linear, v_linear))
        b_v = None if v_linear.bias is None else v_linear.bias.detach().float().view(kv_heads, -1).repeat_interleave(group, 0).cpu()
        q = torch.einsum("hcd,hdw->chw", query[:, kept].float(), w_k)
        return Layer("input", q.cpu(), hidden.cpu(), visible, 0, scaling, w_v.cpu(), b_v, output[kept].float().cpu())
    if not 0 <= kv_head < kv_heads:
        raise ValueError(f"kv_head: got {kv_head}; accepted: 0 to {kv_heads - 1}")
    mine = slice(kv_head * group, (kv_head + 1) * group)
    size = value.shape[-1]
    q = query[mine, kept].float().transpose(0, 1)
    rows = torch.cat([value[kv_head], key[kv_head]], -1).float()
    return Layer("heads", torch.cat([torch.zeros(*q.shape[:2], size, device=q.device), q], -1).cpu(), rows.cpu(), visible, key.shape[-1], scaling,
                 torch.eye(size).expand(group, size, size), None, output[kept, mine].float().cpu())


def _linear_of(states, linears):
    """The linear layer whose output [S, heads * d] is `states` [heads, S, d] to the bit; None where none is."""
    flat = states.transpose(0, 1).reshape(states.shape[1], -1)
    return next((linear for linear, (_, out) in linears.items() if out.shape == flat.shape and torch.equal(out, flat)), None)


def save(found: dict[int, Layer], path: str | Path, model: str, text: str, command: str, versions: str, values: bool = False) -> None:
    """Writes layers as inputs.load_capture reads them, q and rows in bf16.

    values: also w_v [H, v, rank] bf16, b_v [H, v] f32 and output [C, H, v] f32, with which the capture can be checked.
    """
    from safetensors.torch import save_file

    tensors, about = {}, {}
    shared = all([a.tolist() for a in layer.lists] == [b.tolist() for b in next(iter(found.values())).lists] for layer in found.values())
    for n, layer in found.items():
        prefix = "" if shared else f"{n}."
        tensors[f"{prefix}indptr"] = torch.tensor([0, *(len(l) for l in layer.lists)]).cumsum(0).to(torch.int32)
        tensors[f"{prefix}indices"] = torch.cat(layer.lists).to(torch.int32)
        tensors[f"{n}.q"], tensors[f"{n}.kv"] = layer.q.bfloat16(), layer.rows.bfloat16()
        about[str(n)] = dict(kind=layer.kind, softmax_scale=layer.softmax_scale, qk_rope_head_dim=layer.rope)
        if values:
            tensors[f"{n}.w_v"], tensors[f"{n}.output"] = layer.w_v.bfloat16(), layer.output
            if layer.b_v is not None:
                tensors[f"{n}.b_v"] = layer.b_v
    metadata = dict(model=model, text=text, command=command, versions=versions, layers=json.dumps(about))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
