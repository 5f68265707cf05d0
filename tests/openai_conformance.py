#!/usr/bin/env python3
"""Holds a running server to OpenAI's API with OpenAI's own Python client.

    python openai_conformance.py http://127.0.0.1:8080/v1 [--model NAME] [--api-key KEY]

Needs the package `openai` and nothing else. Every check runs, whatever the others did; the last
line is `N passed, M failed`, and the exit status is 1 if any failed. Answers are compared with
each other and with what the client is told about them, never with a fixed text, so that any model
can be served. Checks of the work that a client left behind read `/cluster/status`.
"""

import argparse
import asyncio
import json
import sys
import time
import traceback
import urllib.error
import urllib.request

import openai

CHECKS = []
CHAT = [{"role": "user", "content": "Name three colours and say what each is like."}]
PROMPT = "The capital of France is"


def check(function):
    CHECKS.append(function)
    return function


def expect(condition, *what):
    if not condition:
        raise AssertionError(" ".join(str(w) for w in what) or "expectation failed")


def equal(got, expected, what=""):
    if got != expected:
        raise AssertionError(f"{what}: got {got!r}, expected {expected!r}")


class Server:
    """What the checks talk to."""

    def __init__(self, base_url, model, api_key):
        self.base_url = base_url.rstrip("/")
        self.root = self.base_url.removesuffix("/v1")
        self.api_key = api_key
        self.client = openai.OpenAI(
            base_url=self.base_url, api_key=api_key, timeout=120, max_retries=0
        )
        self.model = model or self.client.models.list().data[0].id

    def chat(self, **fields):
        fields.setdefault("messages", CHAT)
        fields.setdefault("temperature", 0)
        fields.setdefault("max_tokens", 24)
        return self.client.chat.completions.create(model=self.model, **fields)

    def complete(self, **fields):
        fields.setdefault("prompt", PROMPT)
        fields.setdefault("temperature", 0)
        fields.setdefault("max_tokens", 24)
        return self.client.completions.create(model=self.model, **fields)

    def raw(self, path, body=None, headers=None, method=None):
        """Status, headers and body, whatever the status."""
        request = urllib.request.Request(self.root + path, method=method)
        request.add_header("Authorization", f"Bearer {self.api_key}")
        if body is not None:
            request.data = body if isinstance(body, bytes) else json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read().decode()

    def work(self):
        """Requests that the cluster has open, and tokens that its replicas have made so far."""
        status = json.loads(self.raw("/cluster/status")[2])
        router = status["router"]
        loads = [replica["load"] for replica in router["replicas"]]
        running = sum(load["running"] + load["waiting"] for load in loads)
        return router["open_requests"] + running, sum(load["tokens_total"] for load in loads)

    def wait_idle(self, seconds=60):
        """Waits until the cluster has nothing to do."""
        began = time.monotonic()
        while (open_requests := self.work()[0]) != 0:
            if time.monotonic() - began > seconds:
                raise AssertionError(f"{open_requests} requests are still open after {seconds} s")
            time.sleep(0.05)


def refused(call, kind, param=None, code=None):
    """Runs `call`, which must raise `kind` with OpenAI's error object."""
    try:
        call()
    except kind as error:
        body = error.body
        expect(isinstance(body, dict), "the error has no object:", body)
        equal(sorted(body), ["code", "message", "param", "type"], "fields of the error")
        expect(body["message"], "the error has no message")
        if param is not None:
            equal(error.param, param, "param")
        if code is not None:
            equal(error.code, code, "code")
        return error
    raise AssertionError(f"not refused; expected {kind.__name__}")


def text_of(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(getattr(c, "text", None) or getattr(c, "delta", None) and c.delta.content or ""
                   for c in choices)


def finishes(chunks, index=0):
    choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return [c.finish_reason for c in choices if c.finish_reason is not None]


# ---- models and probes -------------------------------------------------------------------------


@check
def models_are_listed_and_retrieved(s):
    listed = s.client.models.list()
    expect(s.model in [m.id for m in listed.data], s.model, "is not listed")
    one = s.client.models.retrieve(s.model)
    equal((one.id, one.object), (s.model, "model"))
    expect(one.created > 0 and one.owned_by)
    refused(lambda: s.client.models.retrieve("no-such-model"), openai.NotFoundError)


@check
def probes_answer(s):
    equal(s.raw("/health")[0], 200, "/health")
    equal(s.raw("/live")[0], 200, "/live")
    status, headers, body = s.raw("/metrics")
    equal(status, 200, "/metrics")
    expect("dunlin_http_requests_total" in body, "no request counter in /metrics")


# ---- whole answers -----------------------------------------------------------------------------


@check
def chat_completion_has_its_shape(s):
    answer = s.chat()
    equal(answer.object, "chat.completion")
    expect(answer.id.startswith("chatcmpl-"), answer.id)
    expect(abs(answer.created - time.time()) < 600, "created:", answer.created)
    equal(answer.model, s.model)
    expect(answer.system_fingerprint, "no system_fingerprint")
    [choice] = answer.choices
    equal((choice.index, choice.message.role), (0, "assistant"))
    expect(choice.message.content, "no content")
    expect(choice.message.tool_calls is None)
    equal(choice.logprobs, None)
    expect(choice.finish_reason in ("stop", "length"), choice.finish_reason)
    usage = answer.usage
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens)
    expect(usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 24)
    expect(0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens)
    expect(answer._request_id, "no x-request-id")


@check
def completion_has_its_shape(s):
    answer = s.complete()
    equal(answer.object, "text_completion")
    expect(answer.id.startswith("cmpl-"), answer.id)
    [choice] = answer.choices
    expect(choice.index == 0 and choice.text and choice.logprobs is None)


@check
def max_tokens_is_kept(s):
    for fields in ({"max_tokens": 5}, {"max_tokens": None, "max_completion_tokens": 5}):
        answer = s.chat(**fields, extra_body={"ignore_eos": True})
        equal(answer.usage.completion_tokens, 5, fields)
        equal(answer.choices[0].finish_reason, "length", fields)
    equal(s.complete(max_tokens=1).usage.completion_tokens, 1)


@check
def messages_may_be_parts_and_have_a_system_message(s):
    parts = [{"type": "text", "text": CHAT[0]["content"]}]
    whole = s.chat()
    equal(
        s.chat(messages=[{"role": "user", "content": parts}]).choices[0].message.content,
        whole.choices[0].message.content,
        "the same text as one part",
    )
    system = {"role": "system", "content": "Answer in one word."}
    answer = s.chat(messages=[system, *CHAT])
    expect(answer.usage.prompt_tokens > 0 and answer.choices[0].message.content)


@check
def a_conversation_goes_on(s):
    first = s.chat().choices[0].message.content
    more = [*CHAT, {"role": "assistant", "content": first}, {"role": "user", "content": "Why?"}]
    answer = s.chat(messages=more)
    expect(answer.choices[0].message.content, "no content")
    expect(answer.usage.prompt_tokens > s.chat().usage.prompt_tokens)


@check
def prompts_come_in_four_forms(s):
    texts = ["One, two,", "A, B,"]
    both = s.complete(prompt=texts)
    equal([c.index for c in both.choices], [0, 1])
    singly = [s.complete(prompt=text) for text in texts]
    equal([c.text for c in both.choices], [a.choices[0].text for a in singly], "alone and together")
    equal(both.usage.prompt_tokens, sum(a.usage.prompt_tokens for a in singly))
    equal(both.usage.completion_tokens, sum(a.usage.completion_tokens for a in singly))
    ids = s.complete(prompt=[10, 11, 12, 13])
    equal(ids.usage.prompt_tokens, 4)
    lists = s.complete(prompt=[[10, 11, 12, 13], [10, 11]])
    equal(lists.usage.prompt_tokens, 6)
    equal(lists.choices[0].text, ids.choices[0].text)


# ---- streams -----------------------------------------------------------------------------------


@check
def chat_stream_equals_the_whole_answer(s):
    whole = s.chat()
    chunks = list(s.chat(stream=True))
    equal({c.object for c in chunks}, {"chat.completion.chunk"})
    equal(len({c.id for c in chunks}), 1, "ids in one stream")
    equal({c.model for c in chunks}, {s.model})
    equal(chunks[0].choices[0].delta.role, "assistant", "role in the first chunk")
    expect(all(c.choices[0].delta.role is None for c in chunks[1:]), "the role came twice")
    equal(text_of(chunks), whole.choices[0].message.content, "text")
    equal(finishes(chunks), [whole.choices[0].finish_reason], "finish reasons")
    expect(chunks[-1].choices[0].finish_reason, "the last chunk has no finish_reason")
    expect(all(c.usage is None for c in chunks), "usage nobody asked for")


@check
def completion_stream_equals_the_whole_answer(s):
    whole = s.complete()
    chunks = list(s.complete(stream=True))
    equal({c.object for c in chunks}, {"text_completion"})
    equal(text_of(chunks), whole.choices[0].text, "text")
    equal(finishes(chunks), [whole.choices[0].finish_reason], "finish reasons")


@check
def a_stream_is_well_formed_to_the_byte(s):
    body = {
        "model": s.model, "messages": CHAT, "stream": True, "max_tokens": 12, "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    status, headers, text = s.raw("/v1/chat/completions", body)
    equal(status, 200)
    expect(headers["content-type"].startswith("text/event-stream"), headers)
    events = [e for e in text.split("\n\n") if e and not e.startswith(":")]
    expect(all(e.startswith("data: ") for e in events), "an event is not 'data: ...'")
    equal([e for e in events if e == "data: [DONE]"], ["data: [DONE]"], "[DONE]")
    equal(events[-1], "data: [DONE]", "the last event")
    chunks = [json.loads(e[6:]) for e in events[:-1]]
    expect(all("usage" in c for c in chunks), "a chunk lacks the field usage")
    expect(all(c["usage"] is None for c in chunks[:-1]), "usage before the last chunk")
    equal(chunks[-1]["choices"], [], "choices of the usage chunk")


@check
def usage_of_a_stream_equals_the_whole_answers(s):
    for call in (s.chat, s.complete):
        whole = call().usage
        chunks = list(call(stream=True, stream_options={"include_usage": True}))
        equal(chunks[-1].choices, [])
        expect(all(c.usage is None for c in chunks[:-1]))
        usage = chunks[-1].usage
        equal(
            (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
            (whole.prompt_tokens, whole.completion_tokens, whole.total_tokens),
        )


@check
def a_repeated_prompt_is_found_in_the_cache(s):
    long = [{"role": "user", "content": f"{time.time()} " + "All work and no play. " * 40}]
    first, second = s.chat(messages=long, max_tokens=4), s.chat(messages=long, max_tokens=4)
    equal(first.choices[0].message.content, second.choices[0].message.content, "warm and cold")
    cached = second.usage.prompt_tokens_details.cached_tokens
    expect(cached > first.usage.prompt_tokens_details.cached_tokens, "cached tokens:", cached)
    expect(cached < second.usage.prompt_tokens)


@check
def characters_of_many_bytes_stay_whole(s):
    prompt = "ďábelské 🫠 龜 👩‍👩‍👧 — "
    whole = s.complete(prompt=prompt, echo=True, max_tokens=16)
    expect(whole.choices[0].text.startswith(prompt), "echo:", whole.choices[0].text)
    chunks = list(s.complete(prompt=prompt, echo=True, max_tokens=16, stream=True))
    equal(text_of(chunks), whole.choices[0].text)


@check
def streams_do_not_disturb_each_other(s):
    alone = [s.complete(prompt=f"{n} plus {n} is").choices[0].text for n in range(8)]

    async def one(client, n):
        stream = await client.completions.create(
            model=s.model, prompt=f"{n} plus {n} is", temperature=0, max_tokens=24, stream=True
        )
        return text_of([chunk async for chunk in stream])

    async def together():
        async with openai.AsyncOpenAI(base_url=s.base_url, api_key=s.api_key) as client:
            return await asyncio.gather(*(one(client, n) for n in range(8)))

    equal(asyncio.run(together()), alone, "together and alone")


# ---- log probabilities -------------------------------------------------------------------------


@check
def chat_logprobs_describe_the_answer(s):
    answer = s.chat(logprobs=True, top_logprobs=3, max_tokens=12)
    content = answer.choices[0].logprobs.content
    expect(content, "no logprobs")
    for entry in content:
        expect(entry.logprob <= 1e-5, "a log probability above 0:", entry.logprob)
        equal(len(entry.top_logprobs), 3, "alternatives")
        values = [t.logprob for t in entry.top_logprobs]
        equal(values, sorted(values, reverse=True), "alternatives in order")
        equal(entry.token, entry.top_logprobs[0].token, "the greedy token is the likeliest")
        equal(entry.logprob, values[0])
    data = b"".join(bytes(entry.bytes) for entry in content)
    equal(data.decode(errors="ignore"), answer.choices[0].message.content, "bytes of the tokens")
    streamed = [
        entry
        for chunk in s.chat(logprobs=True, top_logprobs=3, max_tokens=12, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]
    equal([e.token for e in streamed], [e.token for e in content], "tokens of the stream")
    equal([e.logprob for e in streamed], [e.logprob for e in content], "values of the stream")


@check
def chat_logprobs_without_alternatives(s):
    content = s.chat(logprobs=True, max_tokens=4).choices[0].logprobs.content
    expect(content and all(e.top_logprobs == [] for e in content))


@check
def completion_logprobs_and_offsets(s):
    choice = s.complete(logprobs=2, max_tokens=12).choices[0]
    lists = choice.logprobs
    lengths = {
        len(lists.tokens), len(lists.token_logprobs), len(lists.top_logprobs),
        len(lists.text_offset),
    }
    equal(len(lengths), 1, "lists of different lengths")
    for token, offset in zip(lists.tokens, lists.text_offset):
        if not token.startswith("bytes:"):
            equal(choice.text[offset : offset + len(token)], token, "text at its offset")
    for token, logprob, top in zip(lists.tokens, lists.token_logprobs, lists.top_logprobs):
        expect(token in top and 2 <= len(top) <= 3, "alternatives:", top)
        equal(top[token], logprob)


@check
def echo_scores_the_prompt(s):
    choice = s.complete(echo=True, logprobs=1, max_tokens=1).choices[0]
    expect(choice.text.startswith(PROMPT), choice.text)
    lists = choice.logprobs
    equal(lists.token_logprobs[0], None, "nothing predicts the first token")
    expect(all(v is not None and v <= 1e-5 for v in lists.token_logprobs[1:]))
    scored = s.complete(echo=True, logprobs=1, max_tokens=0)
    equal(scored.choices[0].text, PROMPT, "scoring only")
    equal(scored.usage.completion_tokens, 0)
    count = len(scored.choices[0].logprobs.tokens)
    equal(scored.choices[0].logprobs.token_logprobs, lists.token_logprobs[:count])


# ---- stop, sampling, n -------------------------------------------------------------------------


@check
def a_stop_string_ends_the_answer_before_itself(s):
    text = s.complete(max_tokens=40).choices[0].text
    expect(len(text) > 12, "the model says too little:", text)
    stop = text[6:11]
    expected = text[: text.index(stop)]
    for stops in (stop, [stop], ["\x00never", stop]):
        answer = s.complete(max_tokens=40, stop=stops)
        equal((answer.choices[0].text, answer.choices[0].finish_reason), (expected, "stop"))
        chunks = list(s.complete(max_tokens=40, stop=stops, stream=True))
        equal((text_of(chunks), finishes(chunks)), (expected, ["stop"]), "streamed")
    usage = s.complete(max_tokens=40, stop=stop).usage
    expect(usage.completion_tokens < 40, "work went on after the stop string")
    # A stop string that does not come changes nothing, though its beginning was held back.
    equal(s.complete(max_tokens=40, stop=stop + "\x00").choices[0].text, text)


@check
def several_answers_are_several(s):
    fields = {"n": 3, "temperature": 0.9, "seed": 11, "max_tokens": 16}
    answer = s.chat(**fields)
    equal([c.index for c in answer.choices], [0, 1, 2])
    texts = [c.message.content for c in answer.choices]
    expect(len(set(texts)) > 1, "three equal answers at temperature 0.9:", texts[0])
    one = s.chat(**{**fields, "n": 1})
    equal(texts[0], one.choices[0].message.content, "the first answer does not depend on n")
    equal(answer.usage.prompt_tokens, one.usage.prompt_tokens, "the prompt counts once")
    expect(answer.usage.completion_tokens > one.usage.completion_tokens)
    chunks = list(s.chat(**fields, stream=True))
    equal([text_of(chunks, i) for i in range(3)], texts, "streamed")
    expect(all(len(finishes(chunks, i)) == 1 for i in range(3)))


@check
def a_seed_repeats_and_no_seed_does_not(s):
    def sample(**fields):
        answer = s.complete(temperature=1.2, max_tokens=24, **fields)
        return answer.choices[0].text

    equal(sample(seed=5), sample(seed=5), "the same seed")
    expect(len({sample(seed=n) for n in range(4)}) > 1, "seeds change nothing")
    expect(len({sample() for _ in range(4)}) > 1, "four unseeded answers are equal")


@check
def logit_bias_forbids_and_forces(s):
    ids = {}
    for token in range(300, 340):
        text = s.complete(max_tokens=1, logit_bias={str(token): 100}, logprobs=0)
        ids[token] = text.choices[0].logprobs.tokens
        if len(ids) == 3:
            break
    equal(len({tuple(t) for t in ids.values()}), 3, "a bias of 100 does not force a token")
    token = next(iter(ids))
    # A forced token that is also forbidden among others forced: the other one wins.
    other = list(ids)[1]
    biased = s.complete(max_tokens=1, logit_bias={str(token): -100, str(other): 100}, logprobs=0)
    equal(biased.choices[0].logprobs.tokens, ids[other])


@check
def penalties_and_extensions_are_taken(s):
    answer = s.chat(
        presence_penalty=1.0, frequency_penalty=1.0, top_p=0.9, temperature=0.7, seed=1,
        user="conformance",
        extra_body={
            "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 4,
            "cache_salt": "salt", "ignore_eos": True,
        },
    )
    equal(answer.usage.completion_tokens, 24)


# ---- errors ------------------------------------------------------------------------------------


@check
def wrong_values_are_refused_by_name(s):
    bad = openai.BadRequestError
    refused(lambda: s.chat(temperature=3), bad, "temperature")
    refused(lambda: s.chat(temperature="hot"), bad, "temperature")
    refused(lambda: s.chat(top_p=1.5), bad, "top_p")
    refused(lambda: s.chat(n=0), bad, "n")
    refused(lambda: s.chat(n=100000), bad, "n")
    refused(lambda: s.chat(max_tokens=-1), bad, "max_tokens")
    refused(lambda: s.chat(messages=[]), bad, "messages")
    refused(lambda: s.chat(messages=[{"role": "king", "content": "x"}]), bad, "messages[0].role")
    refused(lambda: s.chat(presence_penalty=5), bad, "presence_penalty")
    refused(lambda: s.chat(frequency_penalty=-5), bad, "frequency_penalty")
    refused(lambda: s.chat(top_logprobs=2), bad, "top_logprobs")
    refused(lambda: s.chat(logprobs=True, top_logprobs=99), bad, "top_logprobs")
    refused(lambda: s.chat(logit_bias={"99999999": 1}), bad, "logit_bias")
    refused(lambda: s.chat(stop=["a", "b", "c", "d", "e"]), bad, "stop")
    refused(lambda: s.chat(stream_options={"include_usage": True}), bad, "stream_options")
    refused(lambda: s.chat(extra_body={"temprature": 1}), bad, "temprature")
    refused(lambda: s.complete(prompt=[]), bad, "prompt")
    refused(lambda: s.complete(prompt=[99999999]), bad, "prompt[0]")
    refused(lambda: s.complete(best_of=3), bad, "best_of")


@check
def what_is_not_supported_is_refused_not_ignored(s):
    bad = openai.BadRequestError
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    refused(lambda: s.chat(tools=[tool]), bad, "tools", "unsupported_parameter")
    refused(
        lambda: s.chat(response_format={"type": "json_object"}), bad, "response_format.type"
    )
    refused(lambda: s.chat(modalities=["text", "audio"]), bad, "modalities")
    refused(lambda: s.complete(suffix="x"), bad, "suffix")


@check
def another_model_is_not_found(s):
    def call():
        return s.client.chat.completions.create(model="gpt-4", messages=CHAT)

    refused(call, openai.NotFoundError, "model", "model_not_found")


@check
def what_does_not_fit_is_refused_with_numbers(s):
    error = refused(
        lambda: s.complete(prompt="word " * 200_000), openai.BadRequestError, "prompt",
        "context_length_exceeded",
    )
    numbers = [word for word in error.body["message"].split() if word.strip("().,").isdigit()]
    expect(len(numbers) >= 2, "no numbers in:", error.body["message"])


@check
def what_is_no_request_is_refused_in_the_same_shape(s):
    cases = [
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"[]", 400),
        ("POST", "/v1/nothing", b"{}", 404),
        ("GET", "/v1/chat/completions", None, 405),
    ]
    for method, path, body, expected in cases:
        status, _, text = s.raw(path, body, method=method)
        equal(status, expected, f"{method} {path}")
        equal(sorted(json.loads(text)["error"]), ["code", "message", "param", "type"])
    status, _, text = s.raw("/v1/chat/completions", b"x=1", {"Content-Type": "text/plain"})
    expect(status in (400, 415), "content type:", status)


# ---- disconnects -------------------------------------------------------------------------------


def tokens_stop(s, leave):
    """Runs `leave`, which starts long work and goes away; the work must stop long before it would
    have been done."""
    s.wait_idle()
    leave()
    s.wait_idle(5)
    time.sleep(0.5)  # for the last of the schedulers' reports
    before = s.work()[1]
    time.sleep(1.0)
    equal(s.work(), (0, before), "requests and tokens after the client had gone")


@check
def a_closed_stream_stops_its_work(s):
    def leave():
        before = s.work()[1]
        stream = s.chat(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
        for number, _ in enumerate(stream):
            if number == 3:
                break
        stream.close()
        s.wait_idle(5)
        # A scheduler reports its totals after its steps, so they may lag behind what was sent.
        until = time.monotonic() + 5
        while (made := s.work()[1] - before) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        expect(3 <= made < 500, "tokens made for a client that took 3:", made)

    tokens_stop(s, leave)


@check
def an_abandoned_whole_answer_stops_its_work(s):
    def leave():
        impatient = s.client.with_options(timeout=0.3)
        try:
            impatient.completions.create(
                model=s.model, prompt=PROMPT, max_tokens=1500, n=4,
                extra_body={"ignore_eos": True},
            )
        except openai.APITimeoutError:
            return
        raise AssertionError("four answers of 1500 tokens took less than 0.3 s")

    tokens_stop(s, leave)


@check
def it_serves_after_all_that(s):
    expect(s.chat().choices[0].message.content)
    s.wait_idle()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url", help="for example http://127.0.0.1:8080/v1")
    parser.add_argument("--model", help="default: the first one listed")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--only", help="run checks whose name contains this")
    args = parser.parse_args()
    server = Server(args.base_url, args.model, args.api_key)
    print(f"openai {openai.__version__}, model {server.model}, at {server.base_url}")
    passed, failed = 0, []
    for function in CHECKS:
        if args.only and args.only not in function.__name__:
            continue
        began = time.monotonic()
        try:
            function(server)
        except Exception as error:  # every failure is reported, whatever it is
            failed.append(function.__name__)
            where = traceback.extract_tb(error.__traceback__)
            line = next((f.lineno for f in where if f.filename == __file__), 0)
            print(f"FAIL {function.__name__}: {type(error).__name__}: {error}")
            print(f"     in line {where[1].lineno if len(where) > 1 else line}")
        else:
            passed += 1
            print(f"ok   {function.__name__} ({time.monotonic() - began:.1f} s)")
    for name in failed:
        print(f"failed: {name}")
    print(f"{passed} passed, {len(failed)} failed")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
