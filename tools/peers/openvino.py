"""OpenVINO GenAI, which reads the GGUF file itself.

It comes with no server. Its continuous batching pipeline is served by `openvino_worker.py`, a few
dozen lines of Python that send a token's number instead of its text: it does less per token than
the others' servers do.
"""
from .worker import WorkerPeer


class OpenVino(WorkerPeer):
    name = "openvino"
    package, version, script = "openvino-genai", "2026.4.1.0", "openvino_worker.py"
    serves = True
    note = f"openvino-genai {version}; served by a small server of ours, which detokenises nothing"
