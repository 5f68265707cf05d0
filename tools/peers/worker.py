"""A peer that is a Python package: installed into an environment of its own and driven there by a
script in `workers/`.

usage of such a script: engine MODEL.gguf THREADS PROMPT,PROMPT GENERATE
                        serve  MODEL.gguf THREADS PORT STREAMS KV_TOKENS      (if `serves`)

`engine` prints one line of JSON: {"prefill 128": tokens/s, ..., "decode": tokens/s}.
"""
import json
import pathlib

from .peer import Peer, make_venv, tests
from .system import PeerFailed, run


class WorkerPeer(Peer):
    package = version = script = None
    serves = False

    def install(self):
        self.python = make_venv(self.folder / "venv", [f"{self.package}=={self.version}"],
                                self.job.logs(f"{self.name}-install.log"))

    def _command(self, mode, *arguments):
        script = pathlib.Path(__file__).with_name("workers") / self.script
        return [self.python, script, mode, self.job.model, self.job.threads, *arguments]

    def engine(self):
        job = self.job
        out = run(self._command("engine", ",".join(map(str, job.prompts)), job.generate),
                  capture=True, timeout=job.patience)
        lines = out.strip().splitlines()
        try:
            figures = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise PeerFailed(f"its worker printed no figures: {lines[-1:]}") from None
        if set(figures) != set(tests(job)):
            raise PeerFailed(f"its worker measured {sorted(figures)}")
        return figures

    def command(self, port):
        if not self.serves:
            return None
        return self._command("serve", port, self.job.streams, self.job.kv_tokens), {}
