"""Dunlin itself: `benches/model.rs` for the engine, one process with one replica for the server."""
import json
import statistics

from .peer import Peer
from .system import NICE, PeerFailed, free_port, run

CLUSTER = """\
[cluster]
name  = "peers"
model = "{model}"
state_dir = "{state}"

[node.solo]
address = "127.0.0.1:{udp}"
http    = "127.0.0.1:{http}"
devices = ["cpu"]
threads = {threads}

[kv]
memory = {kv_bytes}
prefix_cache = false

[[replica]]
name   = "r0"
stages = ["solo/cpu"]
"""


class Dunlin(Peer):
    name = "dunlin"
    note = "this checkout"
    kv_bytes_per_token = None

    def install(self):
        low = NICE if self.job.builds_nicely else []
        build = [*low, "cargo", "build", "--release", "--locked", "--workspace",
                 "--message-format", "json-render-diagnostics"]
        self.program = executable(run([*build, "--bin", "dunlin"], capture=True), "dunlin")
        self.bench = executable(run([*build, "--bench", "model"], capture=True), "model")

    def engine(self):
        job, figures = self.job, {}
        for number, prompt in enumerate(job.prompts):
            facts = self.measure("--prompt", prompt, "--generate", job.generate if number == 0 else 1)
            figures[f"prefill {prompt}"] = statistics.median(facts["prefill_tokens_per_second"])
            if number == 0:
                figures["decode"] = statistics.median(facts["decode_tokens_per_second"])
                figures["read bandwidth"] = facts["read_bandwidth_bytes_per_second"]
                figures["decode bytes"] = facts["decode_bytes_per_token"]
        return figures

    def measure(self, *flags, runs=1):
        """What the model bench measures; its JSON."""
        job = self.job
        return json.loads(run([self.bench, "--model", job.model, "--threads", job.threads,
                               "--runs", runs, "--json", *flags], capture=True, timeout=job.patience))

    def kv_bytes(self):
        """Bytes of as many tokens as the others have room for."""
        if self.kv_bytes_per_token is None:
            facts = self.measure("--prompt", 32, "--generate", 1)
            self.kv_bytes_per_token = facts["kv_bytes_per_token"]
        return self.kv_bytes_per_token * self.job.kv_tokens

    def command(self, port):
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / f"cluster-{port}.toml"
        config.write_text(CLUSTER.format(
            model=self.job.model, state=self.folder / "state", udp=free_port(), http=port,
            threads=self.job.threads, kv_bytes=self.kv_bytes()))
        return [self.program, "node", "--config", config, "--name", "solo"], {}


def executable(messages, name):
    """The program that cargo built."""
    for line in messages.splitlines():
        message = json.loads(line)
        if message.get("target", {}).get("name") == name and message.get("executable"):
            return message["executable"]
    raise PeerFailed(f"cargo built no {name}")
