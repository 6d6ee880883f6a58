"""Completions as OpenAI's objects: whole, or as the chunks of a stream."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence

from specsparse.engine.text.tokenizer import Tokenizer
from specsparse.runtime.requests import PromptLike
from specsparse.runtime.results import Generation, TokenLogprobs, best_of
from specsparse.support.files import Json
from specsparse.tools.serve.asked import Asked
from specsparse.tools.serve.spec_metrics import metrics
from specsparse.tools.serve.worker import Done, News, Ticket

_LEAST = -9999.0
"""What stands for the log probability of nothing (OpenAI's number)."""


def dumped(value: Json) -> bytes:
    """JSON in ASCII, which any text survives."""
    return json.dumps(value, allow_nan=False).encode()


class Answer:
    """Forms the answer to a request.

    Args:
        asked: the request.
        ticket: its completions.
        name: of the model.
        tokenizer: of the model.
    """

    def __init__(self, asked: Asked, ticket: Ticket, name: str, tokenizer: Tokenizer):
        self._asked, self._ticket, self._tokenizer = asked, ticket, tokenizer
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head: Json = {
            "id": ("chatcmpl-" if asked.chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + (".chunk" if asked.chat and asked.stream else ""),
            "created": int(time.time()),
            "model": name,
        }
        self._offsets: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._done: list[Done] = []

    def whole(self, found: Sequence[Done]) -> Json:
        """The answer that comes at once; of `best_of` completions the best `n` of each prompt."""
        asked, every = self._asked, sorted(found, key=lambda done: done.index)
        drawn = asked.params.num_sequences
        choices, chosen = list[Json](), list[Done]()
        for i, prompt in enumerate(asked.prompts):
            group = every[i * drawn : (i + 1) * drawn]
            for generation in best_of([done.generation for done in group], asked.params):
                choices.append(self._choice(len(choices), generation, prompt))
                chosen += [done for done in group if done.generation.stats is generation.stats]
        tokens = sum(len(done.generation.token_ids) for done in every)
        return {**self._head, "choices": choices, "usage": self._usage(tokens), "metrics": self._metrics(chosen)}

    def chunks(self, event: News | Done) -> Iterator[Json]:
        """The chunks of an event of a stream."""
        index, first = event.index, event.index not in self._counts
        if first:
            self._counts[index] = 0
            if self._asked.chat:
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
            elif self._asked.echo:
                prompt = self._asked.prompts[index // self._asked.params.num_sequences]
                yield self._chunk(index, {"text": self._prompt_text(prompt)})
        if isinstance(event, Done):
            self._done.append(event)
            self._counts[index] = len(event.generation.token_ids)
            ended = {"finish_reason": event.generation.finish_reason, "stop_reason": event.generation.stop_reason}
            yield self._chunk(index, {"delta": {}} if self._asked.chat else {"text": ""}, **ended)
            return
        self._counts[index] = event.tokens
        if event.text or event.logprobs:
            text = {"delta": {"content": event.text}} if self._asked.chat else {"text": event.text}
            yield self._chunk(index, text, logprobs=self._logprobs(index, event.logprobs))

    def last(self) -> Iterator[Json]:
        """The chunk of a stream's usage, if it was asked for."""
        if self._asked.include_usage:
            usage = self._usage(sum(self._counts.values()))
            yield {**self._head, "choices": [], "usage": usage, "metrics": self._metrics(self._done)}

    def _chunk(self, index: int, content: Json, **fields: object) -> Json:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **fields}
        usage = self._usage(sum(self._counts.values())) if self._asked.continuous_usage else None
        return {**self._head, "choices": [choice], **({"usage": usage} if self._asked.include_usage else {})}

    def _choice(self, index: int, generation: Generation, prompt: PromptLike) -> Json:
        text, before = generation.text, ()
        if self._asked.echo:
            text = self._prompt_text(prompt) + text
            before = tuple(zip(generation.prompt_token_ids, generation.prompt_logprobs or (), strict=False))
        logprobs = self._logprobs(index, generation.logprobs or (), before)
        content: Json = {"text": text}
        if self._asked.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        ended = {"finish_reason": generation.finish_reason, "stop_reason": generation.stop_reason}
        return {"index": index, **content, "logprobs": logprobs, **ended}

    def _prompt_text(self, prompt: PromptLike) -> str:
        skip = self._asked.params.skip_special_tokens
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special=skip)  # type: ignore[arg-type]  # no chat here

    def _usage(self, generated: int) -> Json:
        drawn = self._asked.params.num_sequences
        prompt = sum(len(s.prompt) for s in self._ticket.sequences[::drawn])
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _metrics(self, found: Sequence[Done]) -> Json | None:
        """Of one completion alone, as vLLM has it; of `best_of` the one that was chosen."""
        if len(found) != 1:
            return None
        stats, times = found[0].generation.stats, found[0].times
        return metrics(stats, times, speculative=self._ticket.pair.drafter not in (None, "none"))

    def _logprobs(
        self,
        index: int,
        entries: Sequence[TokenLogprobs],
        before: Sequence[tuple[int, TokenLogprobs | None]] = (),
    ) -> Json | None:
        """In the form of chats, or that of texts, which begins with the prompt's where it is echoed."""
        if self._asked.params.logprobs is None:
            return None
        if self._asked.chat:
            return {"content": [self._of_chat(entry) for entry in entries], "refusal": None}
        every = [*before, *((entry.token_id, entry) for entry in entries)]
        tokens = [self._shown(token) for token, _ in every]
        offsets, at = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else max(entry.logprob, _LEAST) for _, entry in every],
            "top_logprobs": [None if entry is None else self._top(entry) for _, entry in every],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> Json:
        """The most likely tokens, and the chosen one where it is none of them."""
        every = dict((*entry.top, (entry.token_id, entry.logprob)))
        return {self._shown(token): max(value, _LEAST) for token, value in every.items()}

    def _of_chat(self, entry: TokenLogprobs) -> Json:
        top = [self._one(token, value) for token, value in entry.top]
        return {**self._one(entry.token_id, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": self._shown(token), "logprob": max(logprob, _LEAST), "bytes": list(data)}

    def _shown(self, token: int) -> str:
        """A token as text; one that is part of a character by its bytes, as OpenAI writes it."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
