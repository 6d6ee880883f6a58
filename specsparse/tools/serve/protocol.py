"""OpenAI's protocol: requests read and checked, answers and errors as its objects, vLLM's names beside them."""

import difflib
import itertools
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.errors import UserError
from specsparse.runtime.metrics import rates
from specsparse.runtime.results import Generation, GenerationStats, TokenLogprobs, best_of
from specsparse.runtime.session import text_ids
from specsparse.support import neighbours
from specsparse.support.files import Json
from specsparse.support.options import options_of
from specsparse.tools.serve.worker import Finished, RequestHandle, TextEvent

MAX_SEQUENCES = 64
"""Prompts times completions of one request."""
MAX_TOP_LOGPROBS = 20
MAX_TEXTS, MAX_TEXT_LENGTH = 64, 1024
"""Stop strings or bad words, and characters of one: each is looked for after every token, while others wait."""
MAX_ENTRIES = {"stop": MAX_TEXTS, "bad_words": MAX_TEXTS, "logit_bias": 1024, "stop_token_ids": 64}
_NOT_TAKEN = (
    "logprobs", "prompt_logprobs", "detokenize", "logits_processors", "guided_decoding", "use_beam_search",
)  # fmt: skip
SAMPLING = tuple(name for name in options_of(SamplingParams) if name not in _NOT_TAKEN)
"""Fields of a request that are sampling parameters by the same name."""
WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields that change nothing of the answer here (the model is looked at before)."""
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,), "cache_prompt": (True, False), "continue_final_message": (False,),
    "echo": (False,), "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "priority": (0,), "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"), "tools": ([],), "use_beam_search": (False,),
}  # fmt: skip
"""Values of unsupported fields that clients send and that change nothing."""
_TEXT = ("prompt", "logprobs", "echo", "stream", "stream_options")
_CHAT = (
    "messages", "chat_template_kwargs", "logprobs", "top_logprobs", "max_completion_tokens", "stream", "stream_options",
)  # fmt: skip
_OURS = ("messages", "add_generation_prompt", "continue_final_message", "tools", "chat_template", "tokenize")
"""Names that `chat_template_kwargs` may not set."""
_USAGE = ("include_usage", "continuous_usage_stats")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_NO_LOGPROB = -9999.0  # OpenAI's number for the log probability of an impossible token


class HttpError(Exception):
    """A request that cannot be answered: a status of HTTP, a line, and OpenAI's `type`, `code` and `param`."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", *, code: str | None = None,
        param: str | None = None,
    ):  # fmt: skip
        super().__init__(" ".join(message.split()))
        self.status, self.kind, self.code, self.param = status, kind, code, param

    def body(self) -> Json:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None) -> HttpError:
    """Status 400 for a mistake in one field."""
    return HttpError(400, message, param=param)


# Requests.


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request, of a chat or of texts to continue."""

    chat: bool
    prompts: list[Any]  # a chat's messages alone, or one or several texts
    params: SamplingParams  # for each of them
    stream: bool = False
    include_usage: bool = False  # a last chunk has the usage
    continuous_usage: bool = False  # every chunk has the usage
    echo: bool = False  # the answer begins with the prompt
    template_kwargs: Mapping[str, object] = field(default_factory=dict)  # further variables of the chat template


def parse_request(body: Mapping[str, object], defaults: Mapping[str, object], *, chat: bool) -> CompletionRequest:
    """A request's body, checked; HttpError with status 400 and the field. `defaults` are for fields that it leaves out.

    null is an absent field.
    """
    given, said = dict[str, Any](), dict[str, str]()
    for key, value in body.items():
        if value is None:
            continue
        name = key if key in _CHAT else neighbours.sampling_name(key)
        if name in given:
            raise refused(f"{said[name]} and {key} are one field: give one of them", key)
        given[name], said[name] = value, key
    _refuse_unknown(given, (*(_CHAT if chat else _TEXT), *SAMPLING, *WITHOUT_EFFECT))
    stream, echo = _flag(given, "stream"), _flag(given, "echo")
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or not options.keys() <= {*_USAGE, "include_obfuscation"}:
        raise refused(f"stream_options holds {' and '.join(_USAGE)}", "stream_options")
    if options and not stream:
        raise refused("stream_options is for stream=true", "stream_options")
    usage, continuous_usage = (_flag(options, name) for name in _USAGE)
    params = _params(given, defaults, chat=chat, echo=echo)
    if stream and echo and params.logprobs is not None:
        raise refused("echo with logprobs is not supported in a stream: leave one of the three out", "echo")
    if stream and params.num_sequences > params.n:
        raise refused("best_of is chosen at the end: it must be n where stream is true", "best_of")
    if chat:
        prompts = [_messages(given.get("messages"))]
    else:
        prompts = _prompts(given.get("prompt"))
    if len(prompts) * params.num_sequences > MAX_SEQUENCES:
        raise refused(f"{len(prompts)} prompts of {params.num_sequences} completions are more than {MAX_SEQUENCES}")
    return CompletionRequest(
        chat, prompts, params, stream, usage or continuous_usage, continuous_usage, echo, _template_kwargs(given)
    )


def tokenized(body: Mapping[str, object], model: Model) -> Json:
    """vLLM's answer of `/tokenize`: the ids that a completion or a chat with this prompt or these messages begins with,
    unless `add_special_tokens` is false, also if they are more than the context holds."""
    tokenizer = model.tokenizer
    given = {name: value for name, value in body.items() if value is not None}
    own = ("messages", "add_generation_prompt", "chat_template_kwargs") if "messages" in given else ("prompt",)
    _refuse_unknown(given, ("model", "add_special_tokens", "return_token_strs", *own))
    if "messages" in given:
        opened = _flag(given, "add_generation_prompt", True)
        text = tokenizer.apply_chat_template(
            _messages(given["messages"]), opened, chat_template_kwargs=_template_kwargs(given)
        )
    elif not isinstance(text := given.get("prompt"), str):
        raise refused("prompt must be a text; or give messages", "prompt")
    special = _flag(given, "add_special_tokens", True)
    ids = text_ids(tokenizer, text) if special else tokenizer.encode(text, parse_special=True)
    strings = [tokenizer.token_text(i) for i in ids] if _flag(given, "return_token_strs") else None
    return {"count": len(ids), "max_model_len": model.config.context_length, "tokens": ids, "token_strs": strings}


def detokenized(body: Mapping[str, object], model: Model) -> Json:
    """vLLM's answer of `/detokenize`: the text of `tokens`, special ones by their names."""
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_unknown(given, ("model", "tokens"))
    ids = given.get("tokens")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise refused("tokens must be a list of token ids", "tokens")
    return {"prompt": model.tokenizer.decode(ids, skip_special=False)}


def _refuse_unknown(given: Mapping[str, object], known: Sequence[str]) -> None:
    for name in given:
        if name in known or given[name] in HARMLESS.get(name, ()):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
        said = neighbours.answer(name, at="server")
        hint = f": {said}" if said else f"; did you mean {near[0]!r}?" if near else ""
        message = f"the field {name[:60]!r} is not supported{hint}"
        raise HttpError(400, message, code="unsupported_parameter", param=name[:60])


def _template_kwargs(given: Mapping[str, object]) -> Mapping[str, object]:
    own = given.get("chat_template_kwargs", {})
    if not isinstance(own, dict):
        raise refused(
            'chat_template_kwargs must be an object, such as {"enable_thinking": false}', "chat_template_kwargs"
        )
    if taken := own.keys() & {*_OURS}:
        raise refused(f"chat_template_kwargs may not set {min(taken)}", "chat_template_kwargs")
    return own


def _flag(given: Mapping[str, object], name: str, absent: bool = False) -> bool:
    value = given.get(name, absent)
    if not isinstance(value, bool):
        raise refused(f"{name} must be true or false", name)
    return value


def _params(
    given: Mapping[str, object], defaults: Mapping[str, object], *, chat: bool, echo: bool
) -> SamplingParams:  # fmt: skip
    fields = {**defaults, **{name: given[name] for name in SAMPLING if name in given}}
    if "max_completion_tokens" in given:
        fields["max_tokens"] = given["max_completion_tokens"]
    elif "max_tokens" not in fields:
        fields["max_tokens"] = None if chat else 16
    for name, most in MAX_ENTRIES.items():
        values = fields.get(name)
        if isinstance(values, list | dict) and len(values) > most:
            raise refused(f"{name} holds {len(values)} entries, {most} are the most", name)
        texts = values if isinstance(values, list) else [values]
        if any(isinstance(text, str) and len(text) > MAX_TEXT_LENGTH for text in texts):
            raise refused(f"{name} has a text of more than {MAX_TEXT_LENGTH} characters, the most", name)
    fields["logprobs"] = logprobs = _logprobs(given, chat=chat)
    if echo:
        fields["prompt_logprobs"] = logprobs
    try:
        return SamplingParams.from_dict(fields)
    except UserError as error:
        field = str(error).partition("=")[0]
        raise refused(str(error), field if field in fields else None) from None


def _logprobs(given: Mapping[str, object], *, chat: bool) -> int | None:
    """Number of likely tokens to report with each; None for no log probabilities."""
    name = "top_logprobs" if chat else "logprobs"
    count = given.get(name)
    if count is not None and (type(count) is not int or not 0 <= count <= MAX_TOP_LOGPROBS):
        raise refused(f"{name} must be a whole number from 0 to {MAX_TOP_LOGPROBS}", name)
    if not chat:
        return count
    if _flag(given, "logprobs"):
        return count or 0
    if count is not None:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")
    return None


def _prompts(prompt: object) -> list[Any]:
    """A text, ids, or a list of either."""

    def are_ids(values: object) -> bool:
        return isinstance(values, list) and bool(values) and all(type(v) is int for v in values)

    if (isinstance(prompt, str) and prompt) or are_ids(prompt):
        return [prompt]
    several = prompt if isinstance(prompt, list) else []
    if several and (all(isinstance(p, str) and p for p in several) or all(map(are_ids, several))):
        return several
    raise refused("prompt must be a text, a list of token ids, or a list of texts or of such lists", "prompt")


def _messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise refused('messages must be a list of {"role", "content"}, one at least', "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, str]:
    """A message of text alone, for a chat template."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refused(f'{where} must be an object with "role" and "content"', "messages")
    for name, value in message.items():
        if name not in ("role", "content", "name") and value not in (None, []):
            raise refused(f"{where}.{name[:60]} is not supported: messages are texts", "messages")
    role, content = message["role"], message.get("content")
    if role not in _ROLES:
        raise refused(f"{where}.role is {role[:60]!r}: it must be one of {', '.join(_ROLES)}", "messages")
    if isinstance(content, list):
        parts = [p["text"] for p in content if isinstance(p, dict) and p.get("type") == "text" and "text" in p]
        if len(parts) < len(content) or not all(isinstance(part, str) for part in parts):
            raise refused(f"{where}.content may hold parts of type text only", "messages")
        content = "\n".join(parts)
    if content is None and role == "assistant":  # clients give a turn without text back like this
        content = ""
    if not isinstance(content, str):
        raise refused(f"{where}.content must be a text", "messages")
    return {"role": "system" if role == "developer" else role, "content": content}


# Answers.


def to_bytes(value: Json) -> bytes:
    """JSON in ASCII, which any text survives."""
    return json.dumps(value, allow_nan=False).encode()


class Answer:
    """The objects of an answer: one when all is done, or the chunks of a stream. `name` is the model's."""

    def __init__(self, request: CompletionRequest, handle: RequestHandle, name: str, tokenizer: Tokenizer):
        self._request, self._handle, self._tokenizer = request, handle, tokenizer
        kind = "chat.completion" if request.chat else "text_completion"
        self._head: Json = {
            "id": ("chatcmpl-" if request.chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + (".chunk" if request.chat and request.stream else ""),
            "created": int(time.time()),
            "model": name,
        }
        self._offsets: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._finished: list[Finished] = []

    def whole(self, finished: Sequence[Finished]) -> Json:
        """The answer that is no stream; of `best_of` completions the best `n` of each prompt."""
        request, every = self._request, sorted(finished, key=lambda event: event.index)
        drawn = request.params.num_sequences
        choices, chosen = list[Json](), list[Finished]()
        for i, prompt in enumerate(request.prompts):
            group = every[i * drawn : (i + 1) * drawn]
            for generation in best_of([event.generation for event in group], request.params):
                choices.append(self._choice(len(choices), generation, prompt))
                chosen += [event for event in group if event.generation.stats is generation.stats]
        tokens = sum(len(event.generation.token_ids) for event in every)
        return {**self._head, "choices": choices, "usage": self._usage(tokens, every), "metrics": self._metrics(chosen)}

    def chunks(self, event: TextEvent | Finished) -> Iterator[Json]:
        request, index = self._request, event.index
        if index not in self._counts:
            self._counts[index] = 0
            if request.chat:
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            elif request.echo:
                prompt = request.prompts[index // request.params.num_sequences]
                yield self._chunk(index, {"text": self._prompt_text(prompt)})
        if isinstance(event, Finished):
            self._finished.append(event)
            self._counts[index] = len(event.generation.token_ids)
            ended = {"finish_reason": event.generation.finish_reason, "stop_reason": event.generation.stop_reason}
            yield self._chunk(index, {"delta": {}} if request.chat else {"text": ""}, **ended)
            return
        self._counts[index] = event.tokens
        if event.text or event.logprobs:
            text = {"delta": {"content": event.text}} if request.chat else {"text": event.text}
            yield self._chunk(index, text, logprobs=self._logprobs(index, event.logprobs))

    def last(self) -> Iterator[Json]:
        """The last chunk of a stream, if the request wants its usage."""
        if self._request.include_usage:
            usage = self._usage(sum(self._counts.values()), self._finished)
            yield {**self._head, "choices": [], "usage": usage, "metrics": self._metrics(self._finished)}

    def _chunk(self, index: int, content: Json, **fields: object) -> Json:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **fields}
        counts = self._counts.values()
        usage = self._usage(sum(counts), self._finished) if self._request.continuous_usage else None
        return {**self._head, "choices": [choice], **({"usage": usage} if self._request.include_usage else {})}

    def _choice(self, index: int, generation: Generation, prompt: str | Sequence[int]) -> Json:
        text, before = generation.text, ()
        if self._request.echo:
            text = self._prompt_text(prompt) + text
            before = tuple(zip(generation.prompt_token_ids, generation.prompt_logprobs or (), strict=False))
        content: Json = {"text": text}
        if self._request.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = self._logprobs(index, generation.logprobs or (), before)
        ended = {"finish_reason": generation.finish_reason, "stop_reason": generation.stop_reason}
        return {"index": index, **content, "logprobs": logprobs, **ended}

    def _prompt_text(self, prompt: str | Sequence[int]) -> str:
        skip = self._request.params.skip_special_tokens
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special=skip)

    def _usage(self, generated: int, finished: Sequence[Finished]) -> Json:
        drawn = self._request.params.num_sequences
        prompt = sum(len(s.prompt) for s in self._handle.sequences[::drawn])
        details = {"cached_tokens": sum(event.generation.stats.cached_tokens for event in finished)}
        tokens = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return {**tokens, "prompt_tokens_details": details}

    def _metrics(self, finished: Sequence[Finished]) -> Json | None:
        """Times and vLLM's figures of speculation, of one completion alone; of `best_of` the chosen one's."""
        if len(finished) != 1:
            return None
        stats, times = finished[0].generation.stats, finished[0].times
        count, spent, whole = stats.decode_tokens, times.ended - times.first, times.ended - times.started
        return {
            "time_to_first_token_ms": 1e3 * (times.first - times.started),
            "generation_time_ms": 1e3 * spent,
            "queue_time_ms": 1e3 * (times.started - times.arrived),
            "mean_itl_ms": 1e3 * spent / (count - 1) if count > 1 else None,
            "tokens_per_second": count / whole if whole > 0 else None,
            "speculative_decoding": None if self._handle.spec.drafter is None else speculation(stats),
        }

    def _logprobs(
        self, index: int, entries: Sequence[TokenLogprobs], before: Sequence[tuple[int, TokenLogprobs | None]] = ()
    ) -> Json | None:
        """Log probabilities in the form of chats, or in that of texts, which begins with an echoed prompt's tokens
        (`before`)."""
        if self._request.params.logprobs is None:
            return None
        if self._request.chat:
            content = [
                {**self._one(e.token_id, e.logprob), "top_logprobs": [self._one(*pair) for pair in e.top]}
                for e in entries
            ]
            return {"content": content, "refusal": None}
        every = [*before, *((entry.token_id, entry) for entry in entries)]
        tokens, offsets, at = [self._shown(token) for token, _ in every], [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        top: list[dict[str, float] | None] = []
        for _, entry in every:  # the most likely tokens, and the chosen one if it is none of them
            likely = {} if entry is None else dict((*entry.top, (entry.token_id, entry.logprob)))
            top.append({self._shown(token): max(value, _NO_LOGPROB) for token, value in likely.items()} or None)
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else max(entry.logprob, _NO_LOGPROB) for _, entry in every],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _one(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._shown(token), "logprob": max(logprob, _NO_LOGPROB), "bytes": list(data)}

    def _shown(self, token: int) -> str:
        """A token as text; a part of a character by its bytes, as OpenAI writes it."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def speculation(stats: GenerationStats) -> Json:
    """vLLM's figures: a step is a round that drafted; the bonus token counts in `mean_acceptance_length` alone."""
    c, found = stats.counters, rates(stats.counters)
    reached = (c.num_drafts, *c.num_accepted_tokens_per_pos, 0)
    lengths = defaultdict[int, list[int]](list)
    for drafted, accepted in stats.drafts or ():
        lengths[drafted].append(accepted)
    return {
        "mean_acceptance_length": found["mean_acceptance_length"] or 1.0,
        "draft_acceptance_rate": found["draft_acceptance_rate"] or 0.0,
        "acceptance_histogram": [a - b for a, b in itertools.pairwise(reached)],
        "acceptance_histogram_by_draft_length": {
            str(k): [accepted.count(j) for j in range(k + 1)] for k, accepted in sorted(lengths.items())
        },
        "num_spec_steps": c.num_drafts,
        "num_accepted_draft_tokens": c.num_accepted_tokens,
        "num_draft_tokens": c.num_draft_tokens,
        "num_spec_tokens": len(c.num_accepted_tokens_per_pos),
        "per_step_accepted": [accepted for _, accepted in stats.drafts or ()],
        "per_step_drafted": [drafted for drafted, _ in stats.drafts or ()],
    }
