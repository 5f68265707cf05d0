"""From what was measured to one table: medians, and ratios to Dunlin within each round.

`Results` holds all that the table needs, so that one kept as JSON can be printed again.
"""
import json
import os
import pathlib
import statistics

# Figures that are measured once, not in every round.
ONCE = ("start", "peak MB", "idle", "huge MB")
# Other work that takes so much of a core while something is measured falsifies it: two threads that
# wait for each other at every operation lose more than it takes.
DISTURBED = 0.1


class Results:
    """Values by peer and figure, one a round (None where it failed), and why peers failed."""

    def __init__(self, peers, setup):
        self.peers = {peer.name: {"note": peer.note, "weights": peer.weights} for peer in peers}
        self.setup = setup
        self.values = {name: {} for name in self.peers}
        self.failures = {name: {} for name in self.peers}
        self.notes = []

    def add(self, name, figures, round_number):
        for figure, value in figures.items():
            row = self.values[name].setdefault(figure, [])
            row.extend([None] * (round_number - len(row)))
            row.append(value)

    def fail(self, name, what, why):
        self.failures[name].setdefault(what, str(why))

    def forget_rounds(self):
        for name, figures in self.values.items():
            self.values[name] = {f: values for f, values in figures.items() if f in ONCE}

    def seen(self, name, figure):
        return [v for v in self.values[name].get(figure, []) if v is not None]

    def median(self, name, figure):
        seen = self.seen(name, figure)
        return statistics.median(seen) if seen else None

    def ratio(self, name, figure, higher_is_better):
        """How many times better Dunlin is: median over rounds, in which both met one machine."""
        ours, theirs = (self.values[n].get(figure, []) for n in ("dunlin", name))
        pairs = [(a, b) for a, b in zip(ours, theirs) if a and b]
        if not pairs:
            return None
        return statistics.median(a / b if higher_is_better else b / a for a, b in pairs)

    def save(self, path):
        """Whatever happens meanwhile, the file is whole."""
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({
            "setup": self.setup, "peers": self.peers, "values": self.values,
            "medians": {name: {figure: self.median(name, figure) for figure in figures}
                        for name, figures in self.values.items()},
            "failures": self.failures, "notes": self.notes}, indent=2) + "\n")
        os.replace(part, path)

    @classmethod
    def load(cls, path):
        kept = json.loads(pathlib.Path(path).read_text())
        results = cls([], kept["setup"])
        for name in ("peers", "values", "failures", "notes"):
            setattr(results, name, kept[name])
        return results


def rows(setup):
    """(label, figure, higher is better or None where neither is, how to print it)."""
    speed, ms, prompts, streams = "{:.0f}", "{:.1f}", setup["prompts"], setup["streams"]
    found = [(f"prefill {n}, engine, tokens/s", f"prefill {n}", True, speed) for n in prompts]
    found += [(f"decode {setup['generate']}, engine, tokens/s", "decode", True, speed)]
    found += [(f"prefill {n}, over HTTP, tokens/s", f"http prefill {n}", True, speed)
              for n in prompts]
    found += [("decode, over HTTP, 1 stream, tokens/s", "http decode", True, speed)]
    for s in streams:
        found.append((f"output at {s} stream{'s' * (s > 1)}, tokens/s", f"out {s}", True, speed))
    for s in streams:
        for name in ("ttft", "itl"):
            for p in ("p50", "p99"):
                found.append((f"{name.upper()} {p} at {s}, ms", f"{name} {p} {s}", False, ms))
    found.append(("start to first token, s", "start", False, "{:.2f}"))
    found.append((f"peak memory, {setup['kv_tokens'] * 0.95:,.0f} tokens of KV in use, MB",
                  "peak MB", False, speed))
    found.append(("of its memory on huge pages, MB", "huge MB", None, speed))
    found.append(("processor time of an idle server, % of a core", "idle", None, ms))
    return found


def text(results):
    """The whole report."""
    return "\n".join([head(results), "", table(results), "", notes(results)])


def head(results):
    setup = results.setup
    busy = setup["load_averages"]
    waves = setup.get("waves")
    return (f"{setup['model']}, {setup['threads']} threads, medians of {setup['rounds']} rounds"
            + (f" with {waves} wave{'s' * (waves > 1)} of requests" if waves else "")
            + f", {setup['processor']}, {setup['when']}, {setup['seconds'] / 60:.0f} minutes, "
            f"load average {min(busy):.1f} to {max(busy):.1f}")


def table(results):
    """Markdown: a row a figure, a column a peer. In parentheses: how many times better Dunlin is.

    A peer that gave nothing has no column, but its row all the same: the reason.
    """
    names = [name for name in results.peers if results.values[name]]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for label, figure, higher, form in rows(results.setup):
        cells = [cell(results, name, figure, higher, form) for name in names]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for name in results.peers:
        for what, why in results.failures[name].items():
            lines.append(f"| {name}: {what} | " + why.replace("|", "/")
                         + " |" + " |" * (len(names) - 1))
    return "\n".join(lines)


def cell(results, name, figure, higher, form):
    value = results.median(name, figure)
    if value is None:
        return "-"
    ratio = None
    if name != "dunlin" and higher is not None:
        ratio = results.ratio(name, figure, higher)
    # Fewer values than Dunlin has: it failed later, or was left out to end in time.
    fewer = len(results.seen(name, figure)), len(results.seen("dunlin", figure))
    few = figure not in ONCE and fewer[0] < fewer[1]
    return (form.format(value) + (f" ({ratio:.2f})" if ratio else "")
            + (f" [{fewer[0]} of {fewer[1]}]" if few else ""))


def notes(results):
    lines = [f"- {name}: {about['note']}; weights: {about['weights']}."
             for name, about in results.peers.items() if results.values[name]]
    lines += [f"- {note}" for note in results.notes]
    body = table(results)
    if " of " in body and "[" in body:
        lines.append("- [n of m]: measured in n rounds of m only, to end in time or because it "
                     "failed then.")
    others = [(share, name, figure.removeprefix("others "))
              for name, figures in results.values.items() for figure in figures
              if figure.startswith("others ") for share in results.seen(name, figure)]
    if others:
        share, name, step = max(others)
        many = sum(share > DISTURBED for share, *_ in others)
        lines.append(
            f"- Other work took more than {100 * DISTURBED:.0f} % of a core during {many} of "
            f"{len(others)} measurements; at most {100 * share:.0f} % ({name}, {step}).")
    bandwidth = results.seen("dunlin", "read bandwidth")
    decode, size = results.median("dunlin", "decode"), results.median("dunlin", "decode bytes")
    if bandwidth and decode and size:
        lines.append(
            f"- Dunlin's decode reads {size / 1e6:.1f} MB a token: {decode * size / 1e9:.1f} GB/s, "
            f"{100 * decode * size / max(bandwidth):.0f} % of the best read bandwidth that "
            f"{results.setup['threads']} threads had in these rounds "
            f"({max(bandwidth) / 1e9:.1f} GB/s).")
    return "\n".join(lines)
