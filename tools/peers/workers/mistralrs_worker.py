"""Measures mistral.rs; started by tools/compare_peers in its environment.

usage: mistralrs_worker.py engine MODEL.gguf THREADS PROMPT,PROMPT GENERATE

It takes prompts as text only. One short word repeated is one token each in the vocabularies that
matter here; the counts that it reports are checked.
"""
import json
import os
import pathlib
import sys
import time

model, threads = pathlib.Path(sys.argv[2]), sys.argv[3]
prompts, generate = [int(n) for n in sys.argv[4].split(",")], int(sys.argv[5])
# Read when the package is imported.
os.environ.update(RAYON_NUM_THREADS=threads, HF_HUB_OFFLINE="1")

from mistralrs import CompletionRequest, Runner, Which

which = Which.GGUF(quantized_model_id=str(model.parent), quantized_filename=model.name)
runner = Runner(which, prefix_cache_n=0)


def seconds(prompt, output):
    begun = time.perf_counter()
    answer = runner.send_completion_request(CompletionRequest(
        model="default", prompt=" ".join(["bird"] * prompt), max_tokens=output, temperature=0.0,
        ignore_eos=True))
    taken = time.perf_counter() - begun
    got = answer.usage.prompt_tokens, answer.usage.completion_tokens
    if got != (prompt, output):
        sys.exit(f"{got} tokens were read and made instead of {(prompt, output)}")
    return taken


figures = {}
seconds(8, 4)
for prompt in prompts:
    figures[f"prefill {prompt}"] = prompt / seconds(prompt, 1)
figures["decode"] = generate / seconds(1, generate)
print(json.dumps(figures))
