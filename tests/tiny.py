"""Tiny random models of the architectures Focus is tested on: two layers or the shortest interleaved pattern."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from focus_attn import FocusConfig, FocusModel, get_focus_model
from focus_attn.zoo import tiny_random_model

# Short windows, so that tiny inputs have something to prune.
SPARSE = FocusConfig(num_groups=4, window=3, num_sinks=1)

EXACT = {"atol": 1e-5, "rtol": 1e-5}  # how close fp32 must come

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token
}
GROUPED = {"num_key_value_heads": 2}
INTERLEAVED = {
    **GROUPED,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
}

# What each architecture needs beside the common sizes; the attention kind it stands for.
ARCHITECTURES: dict[str, dict] = {
    "gpt2": {"n_inner": 48},  # multi-head
    "llama": GROUPED,  # grouped queries
    "mistral": {**GROUPED, "sliding_window": None},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": GROUPED,  # grouped queries with bias
    "qwen3": {**GROUPED, "head_dim": 8},  # norm on queries and keys
    "gemma2": {**INTERLEAVED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},  # softcap
    "gemma3_text": {**INTERLEAVED, "query_pre_attn_scalar": 8},
    "olmo2": GROUPED,
    "phi3": {**GROUPED, "sliding_window": None},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "stablelm": {**GROUPED, "partial_rotary_factor": 0.5},
    "deepseek_v3": {  # latent attention: keys wider than values
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "granite": {**GROUPED, "attention_multiplier": 0.3},
    "cohere2": {**INTERLEAVED},
    "gpt_oss": {**INTERLEAVED, "num_local_experts": 4, "num_experts_per_tok": 2},  # learned sinks
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0]},
}


def tiny_config(architecture: str, **changes: object):
    return AutoConfig.for_model(architecture, **{**COMMON, **ARCHITECTURES.get(architecture, {}), **changes})


def tiny_model(architecture: str = "llama", attn_implementation: str = "eager", **changes: object) -> PreTrainedModel:
    """In eval mode, fp32, seeded. Weights are wide enough for attention to matter."""
    torch.manual_seed(0)
    config = tiny_config(architecture, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.2 if "embed" not in name and "wte" not in name else 0.5)
            elif "sinks" in name:
                parameter.normal_()
    return model.eval()


def tokens(batch: int = 2, length: int = 48, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def focus(architecture: str = "llama", config: FocusConfig = SPARSE, **changes: object) -> FocusModel:
    return get_focus_model(tiny_model(architecture, **changes), config)


def logits(model: torch.nn.Module, ids: torch.Tensor, **kwargs: object) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def save_tiny_default(folder):
    """The tiny stand-in for the embedded model and its tokenizer, saved below `folder`. -> the model."""
    model, tokenizer = tiny_random_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return model


def tokenizer_with_bos() -> tuple[PreTrainedTokenizerBase, int]:
    """A tokenizer that begins every text with a token of its own, as Gemma's does, and that token."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_random_model()[1]
    tokenizer.bos_token = "<end>"
    special = [("<end>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=special)
    return tokenizer, tokenizer.bos_token_id


def opened(model, layer=0, head=1):
    """Inside, the head sees everything, whatever its router says."""

    def choose(at, routing):
        query, key = routing.query_groups.clone(), routing.key_groups.clone()
        if at == layer:
            query[:, head] = key[:, head] = 0
        return routing._replace(query_groups=query, key_groups=key)

    return model.override_routing(choose)
