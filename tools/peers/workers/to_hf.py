"""Writes a GGUF file of a llama as a Hugging Face folder in bfloat16; runs in a peer's environment.

usage: to_hf.py MODEL.gguf FOLDER     (needs gguf, safetensors, torch, transformers)
"""
import json
import pathlib
import sys

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

path, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
reader = gguf.GGUFReader(path)


def field(key, default=None):
    found = reader.get_field(key)
    if found is None and default is None:
        sys.exit(f"{path} has no {key}")
    return default if found is None else found.contents()


if field("general.architecture") != "llama":
    sys.exit(f"{path} is a {field('general.architecture')}, only llama is converted")
heads = field("llama.attention.head_count")
kv_heads = field("llama.attention.head_count_kv", heads)

weights = {}
for tensor in reader.tensors:
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    parts = tensor.name.split(".")
    if parts[0] == "blk":
        name = f"model.layers.{parts[1]}.{LAYER[parts[2]]}.weight"
    elif parts[0] in OUTER:
        name = f"{OUTER[parts[0]]}.weight"
    else:
        sys.exit(f"{path} has a tensor {tensor.name} that is not known here")
    if parts[-2] in ("attn_q", "attn_k"):
        # GGUF keeps rotary pairs next to each other, Hugging Face in halves.
        count = heads if parts[-2] == "attn_q" else kv_heads
        rows, columns = values.shape
        values = values.reshape(count, rows // count // 2, 2, columns).transpose(1, 2)
        values = values.reshape(rows, columns)
    weights[name] = values.to(torch.bfloat16).contiguous()

folder.mkdir(parents=True, exist_ok=True)
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
vocab, hidden = weights["model.embed_tokens.weight"].shape
(folder / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "vocab_size": vocab, "hidden_size": hidden,
    "intermediate_size": field("llama.feed_forward_length"),
    "num_hidden_layers": field("llama.block_count"),
    "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    "head_dim": hidden // heads, "hidden_act": "silu",
    "max_position_embeddings": field("llama.context_length"),
    "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
    "rope_theta": field("llama.rope.freq_base", 10000.0),
    "tie_word_embeddings": "lm_head.weight" not in weights,
    "bos_token_id": field("tokenizer.ggml.bos_token_id"),
    "eos_token_id": field("tokenizer.ggml.eos_token_id"),
}, indent=2) + "\n")
AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)
