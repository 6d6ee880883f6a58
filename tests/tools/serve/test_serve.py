"""A server in OpenAI's terms, asked by OpenAI's own client: its texts are `specsparse.generate`'s."""

import json
import threading
import time

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import specsparse  # noqa: E402
from specsparse.engine.text.chat_template import ChatTemplate  # noqa: E402
from specsparse.runtime.session import Session  # noqa: E402
from specsparse.testing import write_tiny_gguf  # noqa: E402
from specsparse.tools.serve import app  # noqa: E402
from tests.tools.serve.serving import NAME, service_of, serving, until  # noqa: E402

PROMPT = "abc abc abc"
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
ON = {"ignore_eos": True}
METHOD = {"drafter": "prompt_lookup"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return specsparse.load(write_tiny_gguf(tmp_path_factory.mktemp("m") / "m.gguf", n_layers=1, context_length=2048))


@pytest.fixture(scope="module")
def url(model):
    with serving(service_of(model)) as address:
        yield address


def client_of(url, key="any"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def client(url):
    with client_of(url) as client:
        yield client


def totals(url):
    """The values of /metrics by name, labels but the model's included."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {name.replace('engine="0",', "").replace(f'model_name="{NAME}"', "").replace("{}", ""): float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines)}  # fmt: skip


def test_a_text_is_that_of_generate(client, model):
    expected = specsparse.generate(model, PROMPT, max_tokens=12, ignore_eos=True, **METHOD)
    found = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, extra_body=ON)
    [choice] = found.choices
    assert choice.text == expected.text and choice.finish_reason == "length" and found.object == "text_completion"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (9, 12, 21)
    ids = list(expected.prompt_token_ids)
    assert (
        client.completions.create(model=NAME, prompt=ids, max_tokens=12, extra_body=ON).choices[0].text == choice.text
    )


def test_a_chat_is_that_of_generate_whole_and_streamed(client, model):
    expected = specsparse.generate(model, CHAT, max_tokens=9, ignore_eos=True, **METHOD)
    parts = [{"type": "text", "text": "hi"}]
    for messages in (CHAT, [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]):
        found = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=9, extra_body=ON)
        assert found.choices[0].message.content == expected.text and found.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=9, stream=True, stream_options={"include_usage": True}, extra_body=ON
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert all(c.usage is None for c in chunks) and last.choices == []
    assert last.usage.completion_tokens == 9 and last.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert last.model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] == 4


def test_a_stop_string_ends_text_and_stream(client, model):
    text = specsparse.generate(model, PROMPT, max_tokens=12, ignore_eos=True).text
    stop = next(c for c in text[2:] if c.isascii() and c.isprintable() and not c.isspace())
    expected = specsparse.generate(model, PROMPT, max_tokens=12, ignore_eos=True, stop=[stop], **METHOD)
    assert expected.finish_reason == "stop"
    whole = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, stop=stop, extra_body=ON)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected.text, "stop")
    assert whole.choices[0].model_extra["stop_reason"] == stop
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=12, stop=[stop], stream=True, stream_options=options, extra_body=ON
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == expected.text
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts) and counts[-1] == len(expected.token_ids)


def test_a_conversation_that_goes_on_is_read_from_there(client, url, model):
    before, said = totals(url), "ab " * 40
    text = client.completions.create(model=NAME, prompt=said, max_tokens=3, extra_body=ON).choices[0].text
    usage = client.completions.create(model=NAME, prompt=said, max_tokens=3, extra_body=ON).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    added = {name: value - before.get(name, 0.0) for name, value in totals(url).items()}
    assert added["vllm:prefix_cache_queries_total"] == 2 * usage.prompt_tokens
    assert added["vllm:prefix_cache_hits_total"] == usage.prompt_tokens - 1
    longer = specsparse.generate(model, said + text + said, max_tokens=3, ignore_eos=True, **METHOD).text
    found = client.completions.create(model=NAME, prompt=said + text + said, max_tokens=3, extra_body=ON)
    assert found.choices[0].text == longer and found.usage.prompt_tokens_details.cached_tokens > 60


def test_the_metrics_of_a_response_are_vllms_and_those_of_generate(client, url, model):
    before = totals(url)
    expected = specsparse.generate(model, "ab " * 40, max_tokens=40, ignore_eos=True, **METHOD).stats.counters
    found = client.completions.create(model=NAME, prompt="ab " * 40, max_tokens=40, extra_body=ON)
    block = found.model_extra["metrics"]["speculative_decoding"]
    assert block["num_spec_steps"] == expected.num_drafts > 0
    assert block["num_draft_tokens"] == expected.num_draft_tokens
    assert block["num_accepted_draft_tokens"] == expected.num_accepted_tokens
    assert block["mean_acceptance_length"] == 1 + expected.num_accepted_tokens / expected.num_drafts
    histogram = block["acceptance_histogram"]
    assert len(histogram) == block["num_spec_tokens"] + 1 and sum(histogram) == expected.num_drafts
    assert sum(j * n for j, n in enumerate(histogram)) == expected.num_accepted_tokens
    steps = list(zip(block["per_step_drafted"], block["per_step_accepted"], strict=True))
    assert len(steps) == expected.num_drafts and sum(k for k, _ in steps) == expected.num_draft_tokens
    assert [sum(a == j for _, a in steps) for j in range(len(histogram))] == histogram
    for k, row in block["acceptance_histogram_by_draft_length"].items():
        assert row == [steps.count((int(k), j)) for j in range(int(k) + 1)]
    assert found.model_extra["metrics"]["time_to_first_token_ms"] > 0
    added = {name: value - before.get(name, 0.0) for name, value in totals(url).items()}
    assert added["vllm:spec_decode_num_drafts_total"] == expected.num_drafts
    assert added["vllm:spec_decode_num_draft_tokens_total"] == expected.num_draft_tokens
    assert added["vllm:spec_decode_num_accepted_tokens_total"] == expected.num_accepted_tokens
    for position, count in enumerate(expected.num_accepted_tokens_per_pos):
        assert added[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{,position="{position}"}}'] == count
    assert added["vllm:generation_tokens_total"] == 40 and added["vllm:time_to_first_token_seconds_count"] == 1
    assert added['vllm:request_success_total{finished_reason="length",}'] == 1
    gaps = added["vllm:inter_token_latency_seconds_count"]
    assert gaps == expected.num_rounds - 1 > 0
    decode = added["vllm:request_decode_time_seconds_sum"]
    assert added["vllm:inter_token_latency_seconds_sum"] == pytest.approx(decode)
    for name in ("request_time_per_output_token_seconds", "time_per_output_token_seconds"):  # the second is deprecated
        assert added[f"vllm:{name}_sum"] == pytest.approx(decode / 39)


def test_shared_noise_is_that_of_no_two_prompts_or_requests(client, model):
    """Keyed by the place as in `generate`; a seed that is not given is a new one for each request."""
    probs = {"max_tokens": 6, "temperature": 1.0}
    expected = specsparse.generate(model, [PROMPT] * 3, ignore_eos=True, seed=3, **probs, **METHOD)
    asked = {"model": NAME, "prompt": [PROMPT] * 3, "extra_body": ON, **probs}
    found = [c.text for c in client.completions.create(**asked, seed=3).choices]
    assert found == [e.text for e in expected] and len(set(found)) == 3
    drawn = [c.text for _ in range(2) for c in client.completions.create(**asked).choices]
    assert len(set(drawn)) == 6


def test_completions_by_seed_and_their_logprobs(client, model):
    own = {"temperature": 1.0, "logprobs": 2, "n": 2, "seed": 3}
    expected = specsparse.generate(model, PROMPT, max_tokens=6, ignore_eos=True, **own, **METHOD)
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 6, **own, "extra_body": ON}
    found, again = (client.completions.create(**asked) for _ in range(2))
    assert [c.text for c in found.choices] == [e.text for e in expected] == [c.text for c in again.choices]
    assert found.choices[0].text != found.choices[1].text and found.usage.completion_tokens == 12
    assert found.model_extra["metrics"] is None  # of one completion alone
    for choice, e in zip(found.choices, expected, strict=True):
        assert choice.logprobs.token_logprobs == [t.logprob for t in e.logprobs]
        assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs)
    streamed = {0: "", 1: ""}
    values = {0: [], 1: []}
    for chunk in client.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.text
        values[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert list(streamed.values()) == [e.text for e in expected]
    assert list(values.values()) == [[t.logprob for t in e.logprobs] for e in expected]


def test_a_newcomer_s_best_of_keeps_its_figures(client, model):
    own = {"temperature": 1.0, "best_of": 2, "seed": 3, "max_tokens": 6, "logprobs": 2}
    expected = specsparse.generate(model, PROMPT, ignore_eos=True, **own, **METHOD)
    found = client.completions.create(model=NAME, prompt=PROMPT, **own, extra_body=ON)
    assert found.choices[0].text == expected.text and found.usage.completion_tokens == 12
    steps = found.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert steps == expected.stats.counters.num_drafts


def test_a_newcomer_s_client_sends_defaults_and_empty_turns(url):
    sent = {"cache_prompt": True, "add_generation_prompt": True, "priority": 0, "parallel_tool_calls": False}
    silent = [*CHAT, {"role": "assistant", "content": None, "tool_calls": None}, CHAT[1]]
    spoken = [*CHAT, {"role": "assistant", "content": ""}, CHAT[1]]
    found = [httpx.post(f"{url}/v1/chat/completions", json={"messages": m, "max_tokens": 3, **more}, timeout=60).json()
             for m, more in ((silent, sent), (spoken, {}))]  # fmt: skip
    assert found[0]["choices"] == found[1]["choices"] and found[0]["usage"]["completion_tokens"] == 3


def test_no_newcomer_waits_for_programs_after_a_warm_up(tmp_path):
    model = specsparse.load(write_tiny_gguf(tmp_path / "m.gguf", n_layers=1, context_length=256))
    service = service_of(model)
    service.warm_up(64)
    known = len(model.programs.compiled)
    with serving(service) as url:
        for body in ({"prompt": PROMPT}, {"prompt": "ab " * 60, "temperature": 0.7, "max_tokens": 5}):
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": CHAT}, timeout=60).status_code == 200
        assert known == len(model.programs.compiled)
        assert totals(url)["vllm:prompt_tokens_total"] < 200  # those asked for alone


def test_logprobs_of_a_chat_and_of_an_echoed_prompt(client, model):
    chat = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=2, logprobs=True, top_logprobs=2)
    expected = specsparse.generate(model, CHAT, max_tokens=2, logprobs=2)
    for found, e in zip(chat.choices[0].logprobs.content, expected.logprobs, strict=True):
        assert (found.logprob, found.bytes) == (e.logprob, list(model.tokenizer.token_bytes(e.token_id)))
        assert [t.logprob for t in found.top_logprobs] == [value for _, value in e.top]
    echoed = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1, logprobs=0, echo=True).choices[0]
    scored = specsparse.generate(model, PROMPT, max_tokens=1, logprobs=0, prompt_logprobs=0)
    assert echoed.text == PROMPT + scored.text
    every = [*scored.prompt_logprobs[1:], *scored.logprobs]
    assert echoed.logprobs.token_logprobs == [None, *(t.logprob for t in every)]
    assert echoed.logprobs.text_offset[:2] == [0, len(echoed.logprobs.tokens[0])]


def test_a_template_s_variables_switch_thinking_off_and_the_same_ids_are_tokenised(model, monkeypatch):
    """As Qwen3's template does, for a chat and for /tokenize."""
    off = "{% if enable_thinking is defined and enable_thinking is false %} off{% endif %}"
    made = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}" + off, {}, where="file")
    monkeypatch.setitem(vars(model.tokenizer), "_chat", made)
    with serving(service_of(model)) as url:
        ask = lambda path, body: httpx.post(f"{url}/{path}", json=body, timeout=60).json()  # noqa: E731
        for own, text in (({}, "shi"), ({"chat_template_kwargs": {"enable_thinking": False, "unused": 1}}, "shi off")):
            usage = ask("v1/chat/completions", {"messages": CHAT, "max_tokens": 1, **own})["usage"]
            ids = ask("tokenize", {"messages": CHAT, **own})
            assert ids["tokens"] == ask("tokenize", {"prompt": text})["tokens"]
            assert usage["prompt_tokens"] == ids["count"] == len(ids["tokens"])


def test_tokenize_detokenize_and_version_are_vllms(url, model):
    tokenizer = model.tokenizer
    ask = lambda path, body: httpx.post(f"{url}/{path}", json=body, timeout=60).json()  # noqa: E731
    found = ask("tokenize", {"model": NAME, "prompt": PROMPT, "return_token_strs": True})
    ids = tokenizer.encode(PROMPT, add_special=True)
    texts = [tokenizer.token_text(i) for i in ids]
    assert found == {"count": len(ids), "max_model_len": 2048, "tokens": ids, "token_strs": texts}
    bare = ask("tokenize", {"prompt": PROMPT, "add_special_tokens": False})
    assert bare["tokens"] == tokenizer.encode(PROMPT) and bare["token_strs"] is None
    assert ask("detokenize", {"tokens": bare["tokens"]}) == {"prompt": PROMPT}
    assert ask("detokenize", {"model": NAME, "tokens": ids}) == {"prompt": tokenizer.decode(ids, skip_special=False)}
    assert ask("tokenize", {"prompt": "ab " * 3000})["count"] > 2048
    assert httpx.get(f"{url}/version").json() == {"version": specsparse.__version__}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("v1/completions", "{", 400, "no JSON"),
        ("v1/completions", "[1]", 400, "must be an object"),
        ("v1/completions", {}, 400, "prompt must be"),
        ("v1/completions", {"prompt": ""}, 400, "prompt must be"),
        ("v1/completions", {"prompt": [[1, "a"]]}, 400, "prompt must be"),
        ("v1/completions", {"prompt": [10**6]}, 400, "outside the vocabulary"),
        ("v1/completions", {"prompt": "\ud800"}, 400, "valid Unicode"),
        ("v1/completions", {"prompt": "ab " * 3000}, 400, "the context holds 2048"),
        ("v1/completions", {"prompt": "a", "model": "gpt"}, 404, "'gpt' is not here; there is 'tiny'"),
        ("v1/completions", {"prompt": "a", "sufix": "b"}, 400, "'sufix' is not supported"),
        ("v1/completions", {"prompt": "a", "num_beams": 3}, 400, "best_of keeps the most likely"),
        ("v1/completions", {"prompt": "a", "temprature": 1}, 400, "did you mean 'temperature'"),
        ("v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("v1/completions", {"prompt": "a", "stop": [""]}, 400, "stop"),
        ("v1/completions", {"prompt": "a", "stop": ["s"] * 65}, 400, "stop holds 65 entries, 64 are the most"),
        ("v1/completions", {"prompt": "a", "stop": "s" * 1025}, 400, "stop has a text of more than 1024 characters"),
        ("v1/completions", {"prompt": "a", "bad_words": ["a"] * 100_000}, 400, "64 are the most"),
        ("v1/chat/completions", {"messages": CHAT, "stop": ["a", "b" * 1025]}, 400, "1024 characters, the most"),
        ("v1/completions", {"prompt": "a", "logprobs": 99}, 400, "from 0 to 20"),
        ("v1/completions", {"prompt": "a", "n": 2}, 400, "greedy completions are all equal"),
        ("v1/completions", {"prompt": "a", "n": 999, "temperature": 1}, 400, "more than 64"),
        ("v1/completions", {"prompt": "a", "stream": 1}, 400, "true or false"),
        ("v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "for stream=true"),
        ("v1/completions", {"prompt": "a", "logit_bias": {"999999": 1}}, 400, "999999"),
        ("v1/completions", {"prompt": "a", "logit_bias": {f"{i:06}": 1 for i in range(1025)}}, 400, "1024 are the"),
        ("v1/completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
        ("v1/completions", {"prompt": "a", "stop_token_ids": [1] * 65}, 400, "holds 65 entries, 64 are the most"),
        ("v1/completions", '{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("v1/completions", "[" * 100_000, 400, "no JSON"),
        ("v1/completions", {"prompt": "a", "logit_bias": {"999999": 1}, "stream": True}, 400, "999999"),
        ("v1/chat/completions", {"messages": []}, 400, "messages must be"),
        ("v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("v1/chat/completions", {"messages": [{"role": "king", "content": "a"}]}, 400, "role is 'king': it must be"),
        ("v1/chat/completions", {"messages": CHAT, "reasoning_effort": "low"}, 400, "'reasoning_effort' is not"),
        ("v1/chat/completions", {"messages": CHAT, "priority": 3}, 400, "'priority' is not supported"),
        ("v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, 400, "'tools' is not supported"),
        ("v1/chat/completions", {"messages": CHAT, "tool_choice": "required"}, 400, "'tool_choice' is not supported"),
        ("v1/chat/completions", {"messages": CHAT, "guided_json": {}}, 400, "'guided_json' is not supported: the"),
        ("v1/completions", {"prompt": "a", "structured_outputs": {"json": {}}}, 400, "'structured_outputs' is not"),
        ("v1/completions", {"prompt": "a", "chat_template_kwargs": {}}, 400, "'chat_template_kwargs' is not supported"),
        ("v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": [1]}, 400, "must be an object"),
        ("v1/chat/completions", {"messages": CHAT, "chat_template_kwargs": {"tools": []}}, 400, "may not set tools"),
        ("tokenize", {}, 400, "prompt must be a text; or give messages"),
        ("tokenize", {"prompt": "a", "chat_template_kwargs": {}}, 400, "'chat_template_kwargs' is not supported"),
        ("tokenize", {"messages": CHAT, "tools": [{"type": "function"}]}, 400, "'tools' is not supported"),
        ("tokenize", {"prompt": "a", "model": "gpt"}, 404, "'gpt' is not here"),
        ("detokenize", {"tokens": ["a"]}, 400, "list of token ids"),
        ("detokenize", {"tokens": [10**6]}, 400, "outside the vocabulary"),
        ("v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "needs logprobs=true"),
        ("v1/chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("v1/embeddings", {}, 404, "no such address"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_in_openais_object(url, path, body, status, said):
    data = body if isinstance(body, str) else json.dumps(body)
    found = httpx.post(f"{url}/{path}", content=data, headers={"Content-Type": "application/json"}, timeout=60)
    error = found.json()["error"]
    assert found.status_code == status and said in error["message"], error
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert not ("reasoning_effort" in error["message"] and "did you mean" in error["message"])


def test_the_client_sees_its_own_exceptions(client, url, monkeypatch):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt="ab " * 3000)
    assert caught.value.code == "context_length_exceeded"
    assert httpx.post(f"{url}/v1/completions", data={"prompt": "a"}).status_code == 415
    monkeypatch.setattr(app, "MAX_BYTES", 10)
    with pytest.raises(openai.APIStatusError, match="larger than"):
        client.completions.create(model=NAME, prompt="a" * 20)


def test_names_health_and_foreign_hosts(client, url):
    assert [m.id for m in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/models", headers={"Host": "evil.example:80"}).status_code == 403
    assert httpx.get(f"{url}/v1/models", headers={"Host": "localhost:80"}).status_code == 200


@pytest.fixture
def slow(monkeypatch):
    """Rounds take a while, so that what is being decoded is so until its client leaves."""
    advance = Session.advance

    def slowly(self, rounds=1):
        time.sleep(0.02)
        advance(self, 1)

    monkeypatch.setattr(Session, "advance", slowly)


def test_who_leaves_ends_the_decoding_and_a_full_queue_says_so(model, slow):
    """One is decoded, one waits, the next is refused; when the first leaves, the second is answered."""
    long = {"model": NAME, "prompt": PROMPT, "max_tokens": 1500, "extra_body": ON}
    short = {"model": NAME, "prompt": PROMPT, "max_tokens": 3}
    with serving(service_of(model, room=1), key="secret", local=False) as url, client_of(url, "secret") as client:
        with pytest.raises(openai.AuthenticationError), client_of(url, "wrong") as other:
            other.models.list()
        assert httpx.get(f"{url}/metrics").status_code == 401 and httpx.get(f"{url}/health").status_code == 200
        values = lambda: httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer secret"}).text  # noqa: E731
        stream = client.completions.create(**long, stream=True)
        next(iter(stream))
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(client.completions.create(**short)))
        waiting.start()
        assert until(lambda: f'vllm:num_requests_waiting{{engine="0",model_name="{NAME}"}} 1.0' in values())
        with pytest.raises(openai.InternalServerError, match="1 requests wait already") as caught:
            client.completions.create(**short)
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "1"
        stream.close()
        waiting.join(60)
        assert answers and answers[0].usage.completion_tokens == 3
        assert 'finished_reason="abort",model_name="tiny"} 1.0' in values()
        # the same where the answer would come at once
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": NAME, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
            head = {"Authorization": "Bearer secret"}
            httpx.post(f"{url}/v1/completions", json=body, headers=head, timeout=httpx.Timeout(20, read=0.3))
        assert until(lambda: 'finished_reason="abort",model_name="tiny"} 2.0' in values())
        generated = next(line for line in values().splitlines() if line.startswith("vllm:generation_tokens_total"))
        assert float(generated.split()[-1]) < 1500


def test_those_that_wait_start_together_with_the_texts_of_generate(model, slow):
    prompts = [PROMPT, "def f(x):", "one two one two"]
    expected = [specsparse.generate(model, p, max_tokens=8, ignore_eos=True).text for p in prompts]
    with serving(service_of(model, drafter=None, batch=3)) as url, client_of(url) as client:
        first = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1500, stream=True, extra_body=ON)
        next(iter(first))
        found = {}

        def ask(i):
            answer = client.completions.create(model=NAME, prompt=prompts[i], max_tokens=8, extra_body=ON)
            found[i] = answer

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        assert until(lambda: totals(url)["vllm:num_requests_waiting"] == 3)
        first.close()
        for thread in threads:
            thread.join(60)
        assert [found[i].choices[0].text for i in range(3)] == expected
        assert all(found[i].model_extra["metrics"]["speculative_decoding"] is None for i in range(3))
        assert not any(name.startswith("vllm:spec_decode") for name in totals(url))
