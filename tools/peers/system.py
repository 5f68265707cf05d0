"""Processes and the machine: running commands, trees that are killed whole, memory, the processor.

A server runs in a session of its own, so that Ctrl-C reaches only the tool, which then ends every
tree that it started (`stop_all`).
"""
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# At the lowest priority, for builds that share the machine.
NICE = ["nice", "-n", "15"]


class PeerFailed(Exception):
    """A peer could not be installed, started or measured; the text is the reason for its row."""


def say(text):
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def run(command, log=None, capture=False, env=None, timeout=None):
    """Runs a command to its end. What it prints goes to the file `log`, or is returned."""
    command = [str(part) for part in command]
    out = subprocess.PIPE if capture else (open(log, "a") if log else sys.stderr)
    err = subprocess.PIPE if capture else out
    try:
        child = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdin=subprocess.DEVNULL,
                                 stdout=out, stderr=err, start_new_session=True)
    except OSError as error:
        raise PeerFailed(f"`{command[0]}` does not start: {error}") from None
    finally:
        if log and not capture:
            out.close()
    tree = Tree.of(child)
    try:
        stdout, stderr = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise PeerFailed(f"`{short(command)}` took more than {timeout:.0f} s") from None
    finally:
        tree.stop(grace=0)
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()
    if child.returncode != 0:
        said = stderr or (tail(log) if log else "")
        raise PeerFailed(f"`{short(command)}` ended with {child.returncode}: {last_line(said)}"
                         + (f" (all of it: {log})" if log and not capture else ""))
    return stdout


def short(command):
    text = " ".join(command)
    return text if len(text) < 90 else text[:87] + "..."


def tail(path, size=4000):
    try:
        return pathlib.Path(path).read_text(errors="replace")[-size:]
    except OSError:
        return ""


def last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


def stat(pid, proc="/proc"):
    """The fields of a process's `stat` behind its name, its state first; None if it is gone."""
    try:
        text = pathlib.Path(proc, str(pid), "stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything.
    return text.rsplit(")", 1)[1].split()


class Tree:
    """A process and all that it starts."""

    alive = []

    def __init__(self, command, log, env=None):
        self.log = pathlib.Path(log)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(part) for part in command]
        with open(self.log, "w") as out:
            try:
                child = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, env={**os.environ, **(env or {})})
            except OSError as error:
                raise PeerFailed(f"`{command[0]}` does not start: {error}") from None
        self._follow(child)

    @classmethod
    def of(cls, child):
        tree = cls.__new__(cls)
        tree.log = None
        tree._follow(child)
        return tree

    def _follow(self, child):
        self.child = child
        Tree.alive.append(self)

    def members(self):
        """The ids of the process, of its session and of all that descend from them."""
        children, members = {}, {self.child.pid}
        for entry in os.listdir("/proc"):
            fields = stat(entry) if entry.isdigit() else None
            if not fields:
                continue
            _, parent, _, session = fields[:4]
            children.setdefault(int(parent), []).append(int(entry))
            if int(session) == self.child.pid:
                members.add(int(entry))
        todo = list(members)
        while todo:
            for pid in children.get(todo.pop(), []):
                if pid not in members:
                    members.add(pid)
                    todo.append(pid)
        return members

    def memory(self, *kinds):
        """Bytes of memory of these kinds of smaps_rollup; without any: all of it, pages that
        several processes share counted once (the sum of PSS)."""
        total, kinds = 0, [f"{kind}:" for kind in kinds or ("Pss",)]
        for pid in self.members():
            try:
                rollup = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += sum(int(line.split()[1]) for line in rollup.splitlines()
                         if line.split(" ", 1)[0] in kinds) * 1024
        return total

    def processor_seconds(self):
        """Processor time that the living processes have used."""
        ticks = sum(sum(map(int, (stat(pid) or [])[11:13])) for pid in self.members())
        return ticks / os.sysconf("SC_CLK_TCK")

    @classmethod
    def others_seconds(cls, proc="/proc"):
        """Processor time of all that this tool did not start, to be compared with itself later.

        That of an ended process is with whoever waited for it.
        """
        ours, ticks = {os.getpid()}, 0
        for tree in cls.alive:
            ours |= tree.members()
        for entry in os.listdir(proc):
            if not entry.isdigit() or int(entry) in ours:
                continue
            ticks += sum(map(int, (stat(entry, proc) or [])[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def why_ended(self):
        """The reason, if the process is gone; else None."""
        code = self.child.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        return f"the server {how}: {last_line(tail(self.log))} (log: {self.log})"

    def signal(self, number):
        """Sends a signal to every process of the tree."""
        for pid in self.members():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def stop(self, grace=10):
        """Asks it to end, then kills whatever is left of the tree."""
        members = self.members()
        if grace and self.child.poll() is None:
            self.child.terminate()
            # What stands still does not hear that it is to end.
            self.signal(signal.SIGCONT)
            try:
                self.child.wait(grace)
            except subprocess.TimeoutExpired:
                pass
        if self.child.poll() is None or len(members) > 1:
            members |= self.members()
        if self.child.poll() is None:
            self.child.kill()
        for pid in members - {self.child.pid}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.child.wait()
        # A signal is delivered in time, not at once; their memory must be free for whoever is next.
        for _ in range(500):
            if not any(runs(pid) for pid in members):
                break
            time.sleep(0.01)
        if self in Tree.alive:
            Tree.alive.remove(self)

    @classmethod
    def stop_all(cls):
        for tree in list(cls.alive):
            tree.stop(grace=2)


def runs(pid):
    """Whether there is such a process, and not only its exit code."""
    fields = stat(pid)
    return fields is not None and fields[0] != "Z"


class MemoryWatch:
    """Peak memory of a tree while a block runs. It costs processor time: not beside a timing."""

    def __init__(self, tree, every=0.1):
        self.tree, self.every, self.peak = tree, every, 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self):
        while True:
            self.peak = max(self.peak, self.tree.memory())
            if self.ended.wait(self.every):
                return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()


def interruptible(tool, action):
    """Runs a tool; however it ends, nothing that it started goes on."""
    def end(*_):
        raise KeyboardInterrupt

    # Like Ctrl-C.
    signal.signal(signal.SIGTERM, end)
    try:
        action()
    except KeyboardInterrupt:
        say("interrupted; ending what was started")
        sys.exit(130)
    except PeerFailed as why:
        sys.exit(f"{tool}: {why}")
    finally:
        # A second Ctrl-C must not leave half of them.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Tree.stop_all()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def http_json(port, path, body=None, timeout=600):
    """Status and JSON of one request; raises OSError where nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        data = json.dumps(body) if body is not None else None
        connection.request("POST" if data else "GET", path, data,
                           {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer: {error}") from None
    finally:
        connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, {}


def processor():
    """Name and flags of the processor."""
    name, flags = "unknown processor", set()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() == "flags":
            flags = set(value.split())
    return name, flags


def has_amx():
    return "amx_int8" in processor()[1]


def warm(path):
    """Reads a file or folder once, so that start-up does not wait for the disk."""
    path = pathlib.Path(path)
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        with open(file, "rb") as f:
            while f.read(1 << 24):
                pass
