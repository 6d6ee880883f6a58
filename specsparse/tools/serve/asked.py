"""What a request asks for: OpenAI's fields, and vLLM's names of sampling parameters beside them, all checked."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from specsparse.engine.sampling.params import ELSEWHERE, SamplingParams
from specsparse.errors import UserError
from specsparse.runtime.requests import PromptLike
from specsparse.support.options import options_of
from specsparse.tools.serve.errors import HttpError

MOST_SEQUENCES = 64
"""Prompts times completions of one request."""
MOST_TOP_LOGPROBS = 20
MOST_TEXTS, LONGEST_TEXT = 64, 1024
"""Stop strings or bad words, and characters of one: each is looked for after every token, while others wait."""
MOST_BIASES, MOST_STOP_IDS = 1024, 64
"""Entries of `logit_bias`, and of `stop_token_ids`."""
_NOT_ASKED = (
    "logprobs", "prompt_logprobs", "detokenize", "logits_processors", "guided_decoding", "use_beam_search",
)  # fmt: skip
SAMPLING = tuple(name for name in options_of(SamplingParams) if name not in _NOT_ASKED)
"""Fields of a request that are sampling parameters by the same name."""
WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields that change nothing of the answer here (the model is looked at before)."""
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,), "cache_prompt": (True, False), "continue_final_message": (False,),
    "echo": (False,), "function_call": ("none", "auto"), "functions": ([],), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "priority": (0,), "tool_choice": ("none", "auto"), "tools": ([],),
    "use_beam_search": (False,),
}  # fmt: skip
"""Values that clients send of fields that are not supported, and that ask for what is done anyway."""
_TEXT = ("prompt", "logprobs", "echo", "stream", "stream_options")
_CHAT = ("messages", "logprobs", "top_logprobs", "max_completion_tokens", "response_format", "stream", "stream_options")
_MESSAGE = ("role", "content", "name")
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Asked:
    """A checked request.

    Attributes:
        chat: whether it is a chat; else a text to continue.
        prompts: one, or several of a text.
        params: for each of them.
        stream: whether the answer comes in pieces.
        include_usage, continuous_usage: whether a last chunk, and every chunk, has the usage.
        echo: whether the answer begins with the prompt.
    """

    chat: bool
    prompts: list[PromptLike]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False


def read(body: Mapping[str, object], defaults: Mapping[str, object], *, chat: bool) -> Asked:
    """A request's body.

    Args:
        body: as JSON gives it; a null is a field that is not there.
        defaults: sampling parameters where the request says nothing.
        chat: whether it came to `/v1/chat/completions`.

    Raises:
        HttpError: 400, with the field.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _check_names(given, _CHAT if chat else _TEXT)
    stream = _flag(given, "stream")
    usage = _stream_options(given, stream)
    echo = _flag(given, "echo")
    logprobs = _logprobs(given, chat=chat)
    if chat and given.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise HttpError(400, "response_format is not supported: the answer is free text", param="response_format")
    fields = dict(defaults)
    fields |= {name: given[name] for name in SAMPLING if name in given}
    if "max_completion_tokens" in given:
        fields["max_tokens"] = given["max_completion_tokens"]
    elif "max_tokens" not in fields:
        fields["max_tokens"] = None if chat else 16
    for name in ("stop", "bad_words"):
        _check_texts(fields.get(name), name)
    for name, most in (("logit_bias", MOST_BIASES), ("stop_token_ids", MOST_STOP_IDS)):
        _check_length(fields.get(name), name, most)
    fields["logprobs"] = logprobs
    if echo and logprobs is not None:
        if stream:
            raise HttpError(
                400, "echo with logprobs is not supported in a stream: leave one of the three out", param="echo"
            )
        fields["prompt_logprobs"] = logprobs
    params = _params(fields)
    if stream and params.num_sequences > params.n:
        raise HttpError(400, "best_of is chosen at the end: it must be n where stream is true", param="best_of")
    prompts = [_messages(given.get("messages"))] if chat else _prompts(given.get("prompt"))
    if len(prompts) * params.num_sequences > MOST_SEQUENCES:
        raise HttpError(
            400, f"{len(prompts)} prompts of {params.num_sequences} completions are more than {MOST_SEQUENCES}"
        )
    return Asked(chat, prompts, params, stream, *usage, echo)


def _check_names(given: Mapping[str, object], own: tuple[str, ...]) -> None:
    """Every field is known."""
    known = (*own, *SAMPLING, *WITHOUT_EFFECT)
    for name in given:
        if name in known or given[name] in HARMLESS.get(name, ()):
            continue
        why = f": {ELSEWHERE[name]}" if name in ELSEWHERE else ""
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)  # at 0.6 reasoning_effort is response_format
        hint = why or (f"; did you mean {near[0]!r}?" if near else "")
        raise HttpError(
            400, f"the field {name[:60]!r} is not supported{hint}", code="unsupported_parameter", param=name[:60]
        )


def _flag(given: Mapping[str, object], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise HttpError(400, f"{name} must be true or false", param=name)
    return value


def _stream_options(given: Mapping[str, object], stream: bool) -> tuple[bool, bool]:
    """`include_usage` and `continuous_usage_stats`."""
    options = given.get("stream_options", {})
    names = ("include_usage", "continuous_usage_stats")
    if not isinstance(options, dict) or not options.keys() <= {*names, "include_obfuscation"}:
        raise HttpError(400, f"stream_options holds {' and '.join(names)}", param="stream_options")
    if options and not stream:
        raise HttpError(400, "stream_options is for stream=true", param="stream_options")
    usage, continuous = (_flag(options, name) for name in names)
    return usage or continuous, continuous


def _logprobs(given: Mapping[str, object], *, chat: bool) -> int | None:
    """How many likely tokens to report with each, None for no log probabilities."""
    if not chat:
        return _count(given, "logprobs")
    wanted, count = _flag(given, "logprobs"), _count(given, "top_logprobs")
    if count is not None and not wanted:
        raise HttpError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    return (count or 0) if wanted else None


def _count(given: Mapping[str, object], name: str) -> int | None:
    value = given.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOP_LOGPROBS):
        return value
    raise HttpError(400, f"{name} must be a whole number from 0 to {MOST_TOP_LOGPROBS}", param=name)


def _check_texts(texts: object, name: str) -> None:
    """Few enough, and short enough; what else may be wrong with them `SamplingParams` says."""
    _check_length(texts, name, MOST_TEXTS)
    several = texts if isinstance(texts, list) else [texts]
    if any(isinstance(text, str) and len(text) > LONGEST_TEXT for text in several):
        raise HttpError(400, f"{name} has a text of more than {LONGEST_TEXT} characters, the most", param=name)


def _check_length(values: object, name: str, most: int) -> None:
    if isinstance(values, list | dict) and len(values) > most:
        raise HttpError(400, f"{name} holds {len(values)} entries, {most} are the most", param=name)


def _params(fields: Mapping[str, object]) -> SamplingParams:
    try:
        return SamplingParams.from_dict(fields)
    except UserError as error:
        field = str(error).partition("=")[0]
        raise HttpError(400, str(error), param=field if field in fields else None) from None


def _prompts(prompt: object) -> list[PromptLike]:
    """A text, ids, or a list of either."""
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(p, str) and p for p in prompt):
            return list(prompt)
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(p, list) and p and _are_ids(p) for p in prompt):
            return list(prompt)
    raise HttpError(
        400, "prompt must be a text, a list of token ids, or a list of texts or of such lists", param="prompt"
    )


def _are_ids(values: list[object]) -> bool:
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values)


def _messages(messages: object) -> list[dict[str, str]]:
    """Messages as a chat template takes them; text alone."""
    if not isinstance(messages, list) or not messages:
        raise HttpError(400, 'messages must be a list of {"role", "content"}, one at least', param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise HttpError(400, f'{where} must be an object with "role" and "content"', param="messages")
    for name, value in message.items():
        if name not in _MESSAGE and value not in (None, []):
            raise HttpError(400, f"{where}.{name[:60]} is not supported: messages are texts", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") == "text" else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise HttpError(400, f"{where}.content may hold parts of type text only", param="messages")
        content = "\n".join(str(part) for part in parts)
    role = message["role"]
    if role not in _ROLES:
        raise HttpError(400, f"{where}.role is {role[:60]!r}: it must be one of {', '.join(_ROLES)}", param="messages")
    if content is None and role == "assistant":  # as clients give a turn back that had no text
        content = ""
    if not isinstance(content, str):
        raise HttpError(400, f"{where}.content must be a text", param="messages")
    return {"role": "system" if role == "developer" else role, "content": content}
