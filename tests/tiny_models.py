"""Small randomly initialised transformers models, one of each class that a capture knows."""

import torch


def _config(name):
    import transformers

    mla = dict(vocab_size=97, hidden_size=64, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=32,
               q_lora_rank=24, v_head_dim=16, qk_nope_head_dim=12, max_position_embeddings=128, index_topk=8, index_head_dim=16, index_n_heads=3,
               first_k_dense_replace=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    usual = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
    return {
        "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(**mla, qk_rope_head_dim=8, indexer_types=["full", "shared", "full"]),
        "deepseek_v32": lambda: transformers.DeepseekV32Config(**mla, qk_rope_head_dim=8),
        "glm5_next": lambda: transformers.models.glm5_next.Glm5NextTextConfig(
            **mla, qk_rope_head_dim=0, index_kpool=4, layer_types=["linear_attention", "indexed_attention", "indexed_attention"],
            indexer_types=["full", "full", "shared"]),
        "bert": lambda: transformers.BertConfig(**usual),
        "llama": lambda: transformers.LlamaConfig(**usual, num_key_value_heads=2),
        "qwen3": lambda: transformers.Qwen3Config(**usual, num_key_value_heads=2, head_dim=16),
        "mistral": lambda: transformers.MistralConfig(**usual, num_key_value_heads=2, sliding_window=8),
        "gpt_oss": lambda: transformers.GptOssConfig(vocab_size=97, hidden_size=48, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                                     head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, max_position_embeddings=128),
        "gemma2": lambda: transformers.Gemma2Config(**usual, num_key_value_heads=2, head_dim=16, attn_logit_softcapping=0.02),
        "deepseek_v3": lambda: transformers.DeepseekV3Config(**{k: v for k, v in mla.items() if not k.startswith("index")}, qk_rope_head_dim=8),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=128),
    }[name]()


def make(name, seed=0):
    """The model in f32, its weights large enough for attention that is not uniform."""
    from transformers import AutoModel

    torch.manual_seed(seed)
    model = AutoModel.from_config(_config(name), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def ids(tokens=48, seed=0):
    return torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(seed))
