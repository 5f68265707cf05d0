"""What every peer is: something that is installed, measured in its engine, and served over HTTP."""
import dataclasses
import os
import pathlib
import sys

from .system import PeerFailed, run, say


@dataclasses.dataclass
class Job:
    """What is measured, the same for all."""

    model: pathlib.Path
    threads: int
    folder: pathlib.Path
    prompts: tuple = (128, 512)
    generate: int = 128
    streams: int = 32
    # Room for KV of this many tokens per stream, in every server.
    stream_tokens: int = 640
    builds_nicely: bool = False
    # Seconds after which one measurement is given up.
    patience: float = 1200

    @property
    def kv_tokens(self):
        return self.streams * self.stream_tokens

    def logs(self, name):
        folder = self.folder / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name


class Peer:
    """Override what the peer can do. `None` from `engine` or `command`: it cannot."""

    name = "?"
    # Which weights it reads, and what a reader must know of how it runs.
    weights = "the same file"
    note = ""
    # Starts are slow: measure one, and keep that server for the rounds.
    slow_start = False
    # Seconds until the first token before a start counts as failed.
    start_within = 60
    # Why it has no engine of its own to measure, or no server, if it has none.
    no_engine = no_server = None

    def __init__(self, job):
        self.job = job
        self.folder = job.folder / self.name

    def install(self):
        """Makes it runnable; does nothing if it is."""

    def prepare(self):
        """Brings the model into a form that it reads."""

    def engine(self):
        """One measurement without a server: {"prefill 128": tokens/s, ..., "decode": tokens/s}."""
        return None

    def command(self, port):
        """The server's command line and environment variables, or None."""
        return None


def tests(job):
    return [f"prefill {n}" for n in job.prompts] + ["decode"]


def make_venv(folder, requirements, log, extra=()):
    """A virtual environment with these packages; made anew if an earlier try was cut short."""
    python, done = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(map(str, requirements))
    if python.is_file() and done.is_file() and done.read_text() == wanted:
        return python
    if sys.version_info < (3, 11):
        raise PeerFailed("needs Python 3.11 or later to install it")
    say(f"installing {', '.join(map(str, requirements))[:100]} (log: {log})")
    if not python.is_file():
        run([sys.executable, "-m", "venv", folder], log)
    run([python, "-m", "pip", "--disable-pip-version-check", "install", *extra, *requirements], log)
    done.write_text(wanted)
    return python


def with_path(folder):
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
