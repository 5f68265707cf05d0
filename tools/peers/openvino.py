"""OpenVINO GenAI, which reads the GGUF file itself.

It comes with no server. Its continuous batching pipeline is served by `openvino_worker.py`, a few
dozen lines of Python that send a token's number instead of its text: it does less per token than
the others' servers do.
"""
import json
import pathlib

from .peer import Peer, make_venv, tests
from .system import PeerFailed, run

VERSION = "2026.4.1.0"
WORKER = pathlib.Path(__file__).with_name("workers") / "openvino_worker.py"


class OpenVino(Peer):
    name = "openvino"
    note = f"openvino-genai {VERSION}; served by a small server of ours, which detokenises nothing"

    def install(self):
        self.python = make_venv(self.folder / "venv", [f"openvino-genai=={VERSION}"],
                                self.job.logs("openvino-install.log"))

    def engine(self):
        job = self.job
        out = run([self.python, WORKER, "engine", job.model, job.threads,
                   ",".join(map(str, job.prompts)), job.generate], capture=True, timeout=600)
        figures = json.loads(out.strip().splitlines()[-1])
        if set(figures) != set(tests(job)):
            raise PeerFailed(f"its worker measured {sorted(figures)}")
        return figures

    def command(self, port):
        job = self.job
        return [self.python, WORKER, "serve", job.model, job.threads, port, job.streams,
                job.kv_tokens], {}
