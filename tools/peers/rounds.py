"""The rounds of a comparison, and what of them fits into the minutes given.

In a round every step is measured on every peer before the next step; the order of the peers changes
from round to round. With a limit in minutes the first round rehearses: one wave of requests, and
what it took decides (`fit`). Where two waves fit, all rounds have two and the rehearsal does not
count; where not even one fits, those who take longest are measured in fewer rounds.

Knows no peer by name: the first of `peers` is the one that all are compared with, and it is in
every round.
"""
import dataclasses
import os
import time

from . import measure, report
from .peer import tests
from .system import PeerFailed, Tree, say

OUTPUT, PROMPT = 128, 128
# A measurement is repeated if other work took more of a core meanwhile, but only so often: where
# there is always other work, it would not help.
DISTURBED, REPEATS = report.DISTURBED, 10
# Rounds are planned to end in time; what takes longer than it did may end so much later.
OVERTIME = 1.1


@dataclasses.dataclass(frozen=True)
class Step:
    name: str
    kind: str
    # Tokens of the prompt, or streams.
    size: int = 0

    def requests(self, waves):
        return max(2, waves * self.size)

    def growth(self):
        """How much longer it takes with two waves than with one."""
        return self.requests(2) / self.requests(1) if self.kind == "streams" else 1.0


def steps(prompts, streams, engine=True, server=True):
    found = [Step("engine", "engine")] if engine else []
    if server:
        found += [Step(f"prefill {n} over HTTP", "prefill", n) for n in prompts]
        found += [Step(f"{n} streams", "streams", n) for n in streams]
    return found


def fit(costs, rounds, seconds, keep):
    """In how many of `rounds` each (peer, step) can be measured within `seconds`.

    `costs`: seconds that each takes a round. What takes longest altogether gives up a round, then
    what takes longest after that, until it fits. `keep`, a peer, gives up none.
    """
    planned = dict.fromkeys(costs, rounds)

    def total(pair):
        return costs[pair] * planned[pair]

    left = seconds - sum(map(total, planned))
    while left < 0:
        able = [pair for pair in planned if pair[0] != keep and planned[pair]]
        if not able:
            break
        longest = max(able, key=total)
        planned[longest] -= 1
        left += costs[longest]
    return planned


class Rounds:
    """`results` gets all figures, and `keep()` is called whenever there are new ones."""

    def __init__(self, peers, servers, client, results, keep, minutes=None, begun=None,
                 clock=time.monotonic, others=Tree.others_seconds):
        self.peers, self.servers, self.client = peers, servers, client
        self.results, self.keep, self.minutes = results, keep, minutes
        self.clock, self.begun = clock, clock() if begun is None else begun
        self.others, self.repeats = others, REPEATS
        self.lost, self.costs, self.busy = set(), {}, [os.getloadavg()[0]]

    def passed(self):
        return (self.clock() - self.begun) / 60

    def run(self, steps, rounds, waves=None):
        """`waves` of requests a round; None: one or two, whatever fits, or two without a limit."""
        results, number = self.results, 0
        rehearses = (self.minutes and waves is None
                     and any(step.kind == "streams" for step in steps))
        waves = waves or (1 if self.minutes else 2)
        while number < rounds:
            results.setup.update(rounds=number + 1, waves=waves)
            planned = self._plan(rounds - number)
            if planned is None or not self._round(number, rounds, steps, waves, planned):
                results.setup["rounds"] = number
                results.notes.append(f"Stopped after {number} rounds: {self.passed():.0f} minutes "
                                     "had passed.")
                return
            number += 1
            if rehearses:
                rehearses = False
                if self._two_waves_fit(rounds):
                    say("two waves of requests fit: beginning anew with them")
                    self.costs = {(peer, step): seconds * step.growth()
                                  for (peer, step), seconds in self.costs.items()}
                    results.forget_rounds()
                    number, waves = 0, 2

    def _left(self):
        return 60 * (self.minutes - self.passed())

    def _two_waves_fit(self, rounds):
        need = sum(seconds * step.growth() for (_, step), seconds in self.costs.items())
        return need * rounds <= self._left()

    def _plan(self, rounds):
        """What is still to be measured how often; None if there is no time for another round."""
        if not self.minutes or not self.costs:
            if self.minutes and self._left() < 0:
                return None
            return {}
        first = self.peers[0].name
        planned = fit(self.costs, rounds, self._left(), first)
        if sum(s for pair, s in self.costs.items() if pair[0] == first) > self._left():
            return None
        need = sum(self.costs[pair] * times for pair, times in planned.items())
        say(f"{self.passed():.0f} minutes have passed; {rounds} rounds take about "
            f"{need / 60:.0f} of the {max(0, self._left() / 60):.0f} that are left")
        return planned

    def _round(self, number, rounds, steps, waves, planned):
        """False if its time ran out before its end."""
        results, shift, begun = self.results, number % len(self.peers), self.passed()
        for place, step in enumerate(steps):
            if self.minutes and self.passed() > self.minutes * OVERTIME:
                return False
            seen = []
            for peer in self.peers[shift:] + self.peers[:shift]:
                pair = peer.name, step
                server = self.servers.get(peer)
                if pair in self.lost or planned.get(pair, 1) < 1:
                    continue
                if server is None and step.kind != "engine":
                    continue
                # The same prompts for every peer, new ones for every step.
                figures = attempt(results, peer, step.name, lambda: self._quietly(
                    step, peer, server, waves, 100 * (number + 1) + place))
                if figures is None:
                    self.lost.add(pair)
                    self.costs.pop(pair, None)
                elif figures:
                    results.add(peer.name, figures, number)
                    seen.append(f"{peer.name} {headline(step, figures, peer.job)}")
                self.keep()
            say(f"round {number + 1} of {rounds}, {step.name}, tokens/s: "
                f"{', '.join(seen) or 'nobody'}")
        self.busy.append(os.getloadavg()[0])
        results.setup["load_averages"] = self.busy
        say(f"round {number + 1} of {rounds} done after {begun:.1f} + "
            f"{self.passed() - begun:.1f} minutes, load {self.busy[-1]:.1f}")
        return True

    def _quietly(self, step, peer, server, waves, seed):
        """Figures, and how much of a core other work took meanwhile: once more if that was much."""
        def once():
            others, begun = self.others(), self.clock()
            figures = self._one(step, peer, server, waves, seed)
            seconds = max(1e-9, self.clock() - begun)
            share = (self.others() - others) / seconds
            if figures:
                self.costs[peer.name, step] = seconds
                figures = figures | {f"others {step.name}": share}
            return share, figures

        share, figures = once()
        if figures and share > DISTURBED and self.repeats:
            self.repeats -= 1
            say(f"{peer.name}, {step.name}: again, for other work took {100 * share:.0f} % of "
                "a core")
            share, figures = min((share, figures), once(), key=lambda found: found[0])
        return figures

    def _one(self, step, peer, server, waves, seed):
        if step.kind == "engine":
            return peer.engine() or {}
        with server.awake():
            if step.kind == "prefill":
                return measure.prefill_over_http(server, self.client, step.size, 3, seed)
            return measure.streams_over_http(server, self.client, step.size, step.requests(waves),
                                             PROMPT, OUTPUT, seed)


def headline(step, figures, job):
    """The tokens a second of a step, for a progress line."""
    if step.kind == "engine":
        return " ".join(f"{figures[name]:.0f}" for name in tests(job) if name in figures) or "-"
    return f"{next(iter(figures.values())):.0f}"


def attempt(results, peer, what, action):
    """The result of `action`, or None with the reason kept."""
    try:
        return action()
    except PeerFailed as why:
        say(f"{peer.name}: {what} failed: {why}")
        results.fail(peer.name, f"{what} failed", why)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        say(f"{peer.name}: {what} failed: {error!r}")
        results.fail(peer.name, f"{what} failed", repr(error))
    return None
