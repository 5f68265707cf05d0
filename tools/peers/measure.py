"""Measures one peer: its start, its memory, one load. Every server meets the same client.

The client is `dunlin bench` (src/bench.rs) with `--url`: prompts of token ids drawn from a seed, so
that no two prompts of a comparison begin alike, and all peers get the same ones. What a server says
it read and made is checked against what was asked for.
"""
import contextlib
import json
import os
import signal
import tempfile
import time

from .system import MemoryWatch, PeerFailed, Tree, free_port, http_json, run

POLL_S = 0.005


class Server:
    """A peer's server that has made its first token.

    While others are measured it stands still (`pause`): what an idle server does at times, and
    threads that spin for a while after their last work, would be a part of the others' figures.
    """

    def __init__(self, peer):
        self.peer, self.port, self.patience = peer, free_port(), peer.job.patience
        command, env = peer.command(self.port)
        begun = time.perf_counter()
        self.tree = Tree(command, peer.job.logs(f"{peer.name}-server.log"), env)
        try:
            self._first_token(peer.start_within)
        except BaseException:
            self.tree.stop(grace=0)
            raise
        self.seconds_to_first_token = time.perf_counter() - begun

    def _first_token(self, within):
        model, deadline = None, time.perf_counter() + within
        while time.perf_counter() < deadline:
            self.check()
            try:
                if model is None:
                    status, listed = http_json(self.port, "/v1/models")
                    model = listed["data"][0]["id"] if status == 200 and listed["data"] else None
                if model is not None:
                    status, answer = http_json(self.port, "/v1/completions", {
                        "model": model, "prompt": [1000, 1001, 1002, 1003], "max_tokens": 1,
                        "temperature": 0})
                    if status == 200:
                        return
                    if status not in (404, 429, 503):
                        raise PeerFailed(f"its first request got {status}: {str(answer)[:200]}")
            except (OSError, KeyError, IndexError):
                pass  # Not listening yet, or not listing the model yet.
            time.sleep(POLL_S)
        raise PeerFailed(f"no token within {within} s (log: {self.tree.log})")

    def check(self):
        why = self.tree.why_ended()
        if why:
            raise PeerFailed(why)

    def idle_share(self, seconds=1.0):
        """Processor time that it uses while nobody asks for anything, as a share of one core."""
        before = self.tree.processor_seconds()
        time.sleep(seconds)
        return (self.tree.processor_seconds() - before) / seconds

    def huge_bytes(self):
        """Its memory on huge pages: fewer translations to look up, if weights are among it."""
        return self.tree.memory("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")

    def pause(self):
        self.tree.signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def awake(self):
        """It runs meanwhile, and made a token before; then it stands still again."""
        self.tree.signal(signal.SIGCONT)
        try:
            self._first_token(60)
            yield
        finally:
            self.pause()

    def stop(self):
        self.tree.stop()


def load(server, client, streams, requests, prompt, output, seed):
    """One closed-loop load; the report of `dunlin bench`, with its counts checked."""
    server.check()
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        run([client, "bench", "--url", f"http://127.0.0.1:{server.port}", "-c", streams,
             "-n", requests, "--warmup", 0, "--prompt-tokens", prompt, "--output-tokens", output,
             "--seed", seed, "--json", path], capture=True, timeout=server.patience)
        with open(path) as file:
            report = json.load(file)["report"]
    except PeerFailed:
        server.check()
        raise
    finally:
        os.unlink(path)
    if report["done"] != requests:
        raise PeerFailed(f"{report['done']} of {requests} requests were answered at {streams} "
                         f"streams: {report['errors']}")
    for name, each in (("prompt", prompt), ("output", output)):
        got = report[f"{name}_tokens"]
        if got != each * requests:
            raise PeerFailed(f"it counted {got} {name} tokens instead of {each * requests}")
    if report["cached_tokens"]:
        raise PeerFailed(f"it had {report['cached_tokens']} tokens in its prefix cache")
    return report


def start_alone(peer, client, times):
    """Starts and stops a server; then its memory under full load. Keeps a slow one running.

    Returns seconds to the first token (one a start), peak bytes, and the server or None.
    """
    seconds = []
    for _ in range(1 if peer.slow_start else times):
        if seconds:
            server.stop()
        server = Server(peer)
        seconds.append(server.seconds_to_first_token)
    try:
        with MemoryWatch(server.tree) as watch:
            # Nearly all of the room for KV: some engines take it at the start, some as it fills.
            # Short prompts and long outputs, so that all streams are at their ends together.
            streams, output = peer.job.streams, peer.job.stream_tokens - 160
            load(server, client, streams, streams, 128, output, seed=9000)
    except BaseException:
        server.stop()
        raise
    if not peer.slow_start:
        server.stop()
        server = None
    return seconds, watch.peak, server


def prefill_over_http(server, client, prompt, requests, seed):
    """Prompt tokens per second by the time to the first token of a lone request."""
    report = load(server, client, 1, requests, prompt, 1, seed)
    return {f"http prefill {prompt}": prompt / report["ttft_ms"]["p50"] * 1e3}


def streams_over_http(server, client, streams, requests, prompt, output, seed):
    report = load(server, client, streams, requests, prompt, output, seed)
    figures = {f"out {streams}": report["output_tokens_per_s"]}
    for name in ("ttft", "itl"):
        for percentile in ("p50", "p99"):
            figures[f"{name} {percentile} {streams}"] = report[f"{name}_ms"][percentile]
    if streams == 1:
        figures["http decode"] = 1e3 / report["tpot_ms"]["p50"]
    return figures
