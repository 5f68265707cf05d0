#!/usr/bin/env python3
"""Make the two tiny test models and their golden outputs.

Both are random but seeded, in Hugging Face layout (config.json, model.safetensors float32,
tokenizer.json), small enough to commit, and share one 512-token byte-level BPE tokenizer:

  tiny-llama    4 layers, hidden 64, 8 query heads, 4 KV heads (GQA), head_dim 8, FFN 192
  tiny-mixtral  3 layers, hidden 64, 8 query heads, 2 KV heads, 8 experts, 2 active, FFN 96

golden.json in each folder holds, per prompt, the prompt ids, 32 greedy ids and the ten highest
logits before each of them, from a float32 forward pass of transformers.

usage: make_fixtures.py OUT_DIR     (needs torch, transformers, tokenizers, safetensors)
"""
import json, pathlib, sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast)

OUT = pathlib.Path(sys.argv[1])
TEXT = [f"the {a} {b} {c} the {d} by the {e}."
        for a in ("grey", "small", "quick", "old") for b in ("bird", "boat", "gull", "tide")
        for c in ("follows", "passes", "watches") for d in ("light", "river", "flock")
        for e in ("sea", "stone", "harbour")]
PROMPTS = ["the grey bird", "the old boat passes the river by", "a", "Tides: 1, 2, 3 — café ☀️",
           "the quick gull watches the flock by the harbour. " * 6,
           "the small tide follows the light " * 20]


def tokenizer():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    vocab = t.get_vocab_size()
    if vocab < 512:
        t.add_tokens([f"<unused{i}>" for i in range(512 - vocab)])
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    return PreTrainedTokenizerFast(
        tokenizer_object=t, bos_token="<s>", eos_token="</s>", chat_template=template)


def spread(model, seed):
    """Seeded weights, scaled so that greedy choices have clear margins."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(1.0 + 0.1 * torch.randn(p.shape, generator=g))
            else:
                p.copy_(torch.randn(p.shape, generator=g) * (1.6 / p.shape[-1] ** 0.5))


def golden(model, tok):
    out = []
    for prompt in PROMPTS:
        ids = tok(prompt, add_special_tokens=False).input_ids
        seq, steps = list(ids), []
        with torch.no_grad():
            for _ in range(32):
                logits = model(torch.tensor([seq])).logits[0, -1]
                v, i = logits.topk(10)
                top = [[int(a), round(float(b), 5)] for a, b in zip(i, v)]
                steps.append(dict(token=int(i[0]), top=top))
                seq.append(int(i[0]))
        out.append(dict(prompt=prompt, prompt_ids=ids, steps=steps))
    return dict(arithmetic="float32", prompts=out)


common = dict(vocab_size=512, hidden_size=64, num_attention_heads=8, max_position_embeddings=1024,
              rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
              rope_theta=10000.0)
llama = LlamaConfig(num_hidden_layers=4, num_key_value_heads=4, intermediate_size=192, **common)
mixtral = MixtralConfig(num_hidden_layers=3, num_key_value_heads=2, intermediate_size=96,
                        num_local_experts=8, num_experts_per_tok=2, sliding_window=None, **common)
specs = [("tiny-llama", LlamaForCausalLM(llama), 11),
         ("tiny-mixtral", MixtralForCausalLM(mixtral), 23)]
tok = tokenizer()
for name, model, seed in specs:
    spread(model, seed)
    model = model.eval().float()
    d = OUT / name
    model.save_pretrained(d); tok.save_pretrained(d)
    g = golden(model, tok)
    (d / "golden.json").write_text(json.dumps(g, ensure_ascii=False))
    margins = [s["top"][0][1] - s["top"][1][1] for p in g["prompts"] for s in p["steps"]]
    count = sum(p.numel() for p in model.parameters())
    print(name, count, "params; min margin", round(min(margins), 4),
          [len(p["prompt_ids"]) for p in g["prompts"]])
