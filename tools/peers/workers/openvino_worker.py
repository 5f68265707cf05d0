"""Runs OpenVINO GenAI; started by tools/compare_peers in its environment.

usage: openvino_worker.py engine MODEL.gguf THREADS PROMPT,PROMPT GENERATE
       openvino_worker.py serve  MODEL.gguf THREADS PORT STREAMS KV_TOKENS

`serve` answers POST /v1/completions for prompts of token ids, with or without "stream". The text
of a token is its number.
"""
import http.server
import json
import os
import sys
import threading
import time

mode, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
# The first cores, as many as threads: more than that would be another comparison.
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))

import numpy
import openvino
import openvino_genai as genai


def ids(tokens):
    return openvino.Tensor(numpy.array([tokens], dtype=numpy.int64))


def config(tokens):
    return genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)


def engine(prompts, generate):
    pipe = genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    # Every prompt begins with another token, since the pipeline knows a prefix again.
    firsts = iter(range(1000, 2000))

    def seconds(prompt, output):
        tokens = [next(firsts)] + [1000 + 7919 * i % 19000 for i in range(1, prompt)]
        begun = time.perf_counter()
        made = pipe.generate(ids(tokens), config(output)).tokens[0]
        taken = time.perf_counter() - begun
        if len(made) != output:
            sys.exit(f"{len(made)} tokens were made instead of {output}")
        return taken

    figures = {}
    for prompt in prompts:
        seconds(prompt, 1)
        figures[f"prefill {prompt}"] = prompt / seconds(prompt, 1)
    seconds(1, 8)
    figures["decode"] = generate / seconds(1, generate)
    print(json.dumps(figures))


class Batches:
    """One thread steps the pipeline and writes each new token to whoever asked for it."""

    def __init__(self, streams, kv_tokens):
        settings = genai.SchedulerConfig()
        settings.max_num_seqs = streams
        settings.num_kv_blocks = -(-kv_tokens // 32)  # blocks of 32 tokens on a CPU
        settings.enable_prefix_caching = False
        settings.max_num_batched_tokens = 512
        self.pipe = genai.ContinuousBatchingPipeline(
            model, settings, "CPU", {"INFERENCE_NUM_THREADS": threads})
        self.changed = threading.Condition()
        self.waiting, self.count = [], 0
        threading.Thread(target=self._step, daemon=True).start()

    def add(self, tokens, output, write):
        ended = threading.Event()
        with self.changed:
            self.waiting.append((tokens, output, write, ended))
            self.changed.notify()
        ended.wait()

    def _step(self):
        running = []
        while True:
            with self.changed:
                while not self.waiting and not running:
                    self.changed.wait()
                added, self.waiting = self.waiting, []
            for tokens, output, write, ended in added:
                self.count += 1
                handle = self.pipe.add_request(self.count, ids(tokens), config(output))
                running.append((handle, write, ended))
            self.pipe.step()
            for entry in list(running):
                handle, write, ended = entry
                while handle.can_read():
                    for part in handle.read().values():
                        write(part.generated_ids)
                if handle.get_status() != genai.GenerationStatus.RUNNING:
                    running.remove(entry)
                    ended.set()


class Handler(http.server.BaseHTTPRequestHandler):
    batches = None

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._json({"data": [{"id": "openvino"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        made = []

        def write(tokens):
            made.extend(tokens)
            if body.get("stream"):
                self._event({"choices": [{"text": " ".join(map(str, tokens))}]})

        if body.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
        self.batches.add(body["prompt"], body["max_tokens"], write)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(made)}
        if body.get("stream"):
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self._json({"choices": [{"text": " ".join(map(str, made))}], "usage": usage})

    def _event(self, value):
        try:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        except OSError:
            pass  # The client hung up; the others go on.

    def _json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if mode == "engine":
    engine([int(n) for n in sys.argv[4].split(",")], int(sys.argv[5]))
else:
    Handler.batches = Batches(int(sys.argv[5]), int(sys.argv[6]))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[4])), Handler)
    server.daemon_threads = True
    server.serve_forever()
