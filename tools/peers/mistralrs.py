"""mistral.rs, from its Python package: the engine only.

The package has no server in it; its HTTP server is to be compiled from the crate
`mistralrs-server`, which takes far longer than everything else here, so it is not measured.
"""
import json
import pathlib

from .peer import Peer, make_venv, tests
from .system import PeerFailed, run

VERSION = "0.9.5"
WORKER = pathlib.Path(__file__).with_name("workers") / "mistralrs_worker.py"


class MistralRs(Peer):
    name = "mistral.rs"
    note = f"mistralrs {VERSION} (Python package: no server in it)"

    def install(self):
        self.python = make_venv(self.job.folder / "mistralrs" / "venv", [f"mistralrs=={VERSION}"],
                                self.job.logs("mistralrs-install.log"))

    def engine(self):
        job = self.job
        env = {"HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": str(job.threads)}
        out = run(["env", *(f"{k}={v}" for k, v in env.items()), self.python, WORKER, job.model,
                   ",".join(map(str, job.prompts)), job.generate], capture=True, timeout=600)
        figures = json.loads(out.strip().splitlines()[-1])
        if set(figures) != set(tests(job)):
            raise PeerFailed(f"its worker measured {sorted(figures)}")
        return figures
