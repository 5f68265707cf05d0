"""mistral.rs, from its Python package: the engine only.

The package has no server in it; its HTTP server is to be compiled from the crate
`mistralrs-server`, which takes far longer than everything else here, so it is not measured.
"""
from .worker import WorkerPeer


class MistralRs(WorkerPeer):
    name = "mistral.rs"
    package, version, script = "mistralrs", "0.9.5", "mistralrs_worker.py"
    note = f"mistralrs {version}, its Python package"
    no_server = "its Python package has none, and no completions of token ids that stream"
