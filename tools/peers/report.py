"""From what was measured to one table: medians, and ratios to Dunlin within each round."""
import statistics


class Results:
    """Values by peer and figure, one a round (None where it failed), and why peers failed."""

    def __init__(self, peers):
        self.values = {peer.name: {} for peer in peers}
        self.failures = {peer.name: {} for peer in peers}
        self.notes = []

    def add(self, name, figures, round_number):
        for figure, value in figures.items():
            row = self.values[name].setdefault(figure, [])
            row.extend([None] * (round_number - len(row)))
            row.append(value)

    def fail(self, name, what, why):
        self.failures[name].setdefault(what, str(why))

    def median(self, name, figure):
        seen = [v for v in self.values[name].get(figure, []) if v is not None]
        return statistics.median(seen) if seen else None

    def ratio(self, name, figure, higher_is_better):
        """How many times better Dunlin is: median over rounds, in which both met one machine."""
        ours, theirs = (self.values[n].get(figure, []) for n in ("dunlin", name))
        pairs = [(a, b) for a, b in zip(ours, theirs) if a and b]
        if not pairs:
            return None
        return statistics.median(a / b if higher_is_better else b / a for a, b in pairs)

    def as_json(self):
        return {
            "values": self.values,
            "medians": {name: {figure: self.median(name, figure) for figure in figures}
                        for name, figures in self.values.items()},
            "failures": self.failures,
            "notes": self.notes,
        }


def rows(job, streams):
    """(label, figure, higher is better, how to print it)."""
    speed, ms = "{:.0f}", "{:.1f}"
    found = [(f"prefill {n}, engine, tokens/s", f"prefill {n}", True, speed) for n in job.prompts]
    found += [(f"decode {job.generate}, engine, tokens/s", "decode", True, speed)]
    found += [(f"prefill {n}, over HTTP, tokens/s", f"http prefill {n}", True, speed)
              for n in job.prompts]
    found += [("decode, over HTTP, 1 stream, tokens/s", "http decode", True, speed)]
    for s in streams:
        found.append((f"output at {s} stream{'s' * (s > 1)}, tokens/s", f"out {s}", True, speed))
    for s in streams:
        for name in ("ttft", "itl"):
            for p in ("p50", "p99"):
                found.append((f"{name.upper()} {p} at {s}, ms", f"{name} {p} {s}", False, ms))
    found.append(("start to first token, s", "start", False, "{:.2f}"))
    found.append((f"peak memory, {job.kv_tokens * 0.95:,.0f} tokens of KV in use, MB", "peak MB", False, speed))
    return found


def table(results, peers, job, streams):
    """Markdown: a row a figure, a column a peer. In parentheses: how many times better Dunlin is.

    A peer that gave nothing has no column, but its row all the same: the reason.
    """
    names = [peer.name for peer in peers if results.values[peer.name]]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for label, figure, higher, form in rows(job, streams):
        cells = []
        for name in names:
            value = results.median(name, figure)
            if value is None:
                cells.append("-")
                continue
            ratio = None if name == "dunlin" else results.ratio(name, figure, higher)
            cells.append(form.format(value) + (f" ({ratio:.2f})" if ratio else ""))
        if any(cell != "-" for cell in cells):
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for peer in peers:
        for what, why in results.failures[peer.name].items():
            lines.append(f"| {peer.name}: {what} failed | " + why.replace("|", "/")
                         + " |" + " |" * (len(names) - 1))
    return "\n".join(lines)


def notes(results, peers, job):
    lines = [f"- {peer.name}: {peer.note}; weights: {peer.weights}."
             for peer in peers if results.values[peer.name]]
    lines += [f"- {note}" for note in results.notes]
    bandwidth = [v for v in results.values["dunlin"].get("read bandwidth", []) if v]
    decode, size = results.median("dunlin", "decode"), results.median("dunlin", "decode bytes")
    if bandwidth and decode and size:
        lines.append(
            f"- Dunlin's decode reads {size / 1e6:.1f} MB a token: {decode * size / 1e9:.1f} GB/s, "
            f"{100 * decode * size / max(bandwidth):.0f} % of the best read bandwidth that "
            f"{job.threads} threads had in these rounds ({max(bandwidth) / 1e9:.1f} GB/s).")
    return "\n".join(lines)
