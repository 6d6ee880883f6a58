"""What notebooks use: load a model, generate, stream."""

import itertools
import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import numpy as np

from specsparse.engine.generate import Finish
from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.engine.text.stopping import TokenText
from specsparse.errors import UserError
from specsparse.powerinfer.ffn.fewer import with_fewer_neurons
from specsparse.runtime import hostloop
from specsparse.runtime.hostloop import Watch
from specsparse.runtime.load import load
from specsparse.runtime.results import Generation, GenerationStats, best_of, decode, generations, read_texts
from specsparse.runtime.session import NOTED_ROUNDS, Method, Sequence, Session
from specsparse.runtime.times.defaults import draft_share, policy_times
from specsparse.speculative.base import Drafter, Verifier
from specsparse.speculative.drafters.plan import Bound, DrafterPlan, MakeModel
from specsparse.speculative.drafters.registry import get_drafter
from specsparse.speculative.drafters.with_policy import with_policy
from specsparse.speculative.method import choose_verifier
from specsparse.speculative.origins import PLAIN, Origin
from specsparse.speculative.policies.base import SHORT_GAMMA, Fixed
from specsparse.speculative.policies.registry import default_policy

__all__ = ["Generation", "GenerationStats", "Model", "SamplingParams", "Stream", "generate", "load", "stream"]

LOOPS = ("jit", "host")


def generate(
    model: Model,
    prompt: Any,
    *,
    max_tokens: int | None = None,
    sampling: SamplingParams | Seq[SamplingParams] | None = None,
    drafter: str | Drafter | DrafterPlan | None = None,
    verifier: str | Verifier | None = None,
    seed: int | None = None,
    loop: str = "jit",
    watch: Watch | None = None,
    **fields: Any,
) -> Generation | list[Generation]:
    """Generates a continuation of one prompt, or of each prompt of a list in one batch.

    Args:
        model: from `load`.
        prompt: text, token ids, or a chat (a list of {"role", "content"}); a list of texts or of id lists is a batch.
        max_tokens: most tokens to generate; wins over the field of `sampling`.
        sampling: default greedy; for a list of prompts it may be a list with an entry for each.
        drafter: a registered name, a `Drafter`, a plan of one (`get_drafter`), or None for plain decoding.
        verifier: a registered name or a `Verifier`; by default the first lossless one that fits the drafter.
        seed: of the noise, where `sampling.seed` is None; None draws a new one. The result says which it was.
        loop: "jit", the whole decode in one program; or "host", a program a stage: slower, the same tokens, and the
            counters have the time of each stage.
        watch: called with every speculative round (`runtime.hostloop.RoundView`); the loop is the host's then.
        fields: further fields of `SamplingParams`, which win over `sampling`.

    Returns:
        A `Generation`; a list of them for a list of prompts, and for n > 1 (n for each prompt).

    Raises:
        UserError: a mistake in any of these, in one line.
    """
    prompts, many = _prompts(prompt)
    every = _every_params(model, sampling, max_tokens, fields, len(prompts), many)
    method = make_method(model, drafter, verifier, max(every, key=lambda p: 0.0 if p.greedy else p.temperature))
    drawn = _seed(seed)
    groups = [_sequences(prompt_ids(model, p, params), params, drawn) for p, params in zip(prompts, every, strict=True)]
    sequences = [sequence for group in groups for sequence in group]
    if loop not in LOOPS:
        raise UserError(f"loop={loop!r} must be one of {', '.join(LOOPS)}")
    session = Session(model, sequences, method, noting=any(s.params.stop for s in sequences))
    if loop == "host" or watch or model.stepped:
        texts = decode(session, partial(hostloop.run, session, watch=watch), rounds=1)
    else:
        texts = decode(session, session.advance)
    found = iter(generations(session, texts))
    grouped = zip(groups, every, strict=True)
    out = [g for group, params in grouped for g in best_of(list(itertools.islice(found, len(group))), params)]
    return out if many or len(out) > 1 else out[0]


def _sequences(ids: np.ndarray, params: SamplingParams, seed: int) -> list[Sequence]:
    """The completions to draw for a prompt. Log probabilities are kept where the best of them are to be chosen."""
    ranked = params.merged(logprobs=0) if params.num_sequences > params.n and params.logprobs is None else params
    own = seed if params.seed is None else params.seed
    return [Sequence(ids, ranked, own, sample) for sample in range(params.num_sequences)]


class Stream(Iterator[str]):
    """Text pieces as they come; `generation` is set when the text has ended."""

    def __init__(self, session: Session, rounds: int):
        self._session, self._rounds = session, rounds
        self.generation: Generation | None = None
        self._groups = self._run()

    def __next__(self) -> str:
        while True:
            if text := "".join(piece for piece, _ in next(self._groups)):
                return text

    def marked(self) -> Iterator[tuple[str, Origin]]:
        """The same text token by token, each piece with where it came from."""
        return itertools.chain.from_iterable(self._groups)

    def tokens(self) -> Iterator[str]:
        """The same text token by token: one piece for each token that adds to it, also of an accepted draft."""
        return (piece for piece, _ in self.marked())

    def _run(self) -> Iterator[list[tuple[str, Origin]]]:
        """What may be shown after each few rounds."""
        session, params = self._session, self._session.sequences[0].params
        text = TokenText(session.model.tokenizer, params)
        while not text.ended:
            if session.finish[0] == Finish.RUNNING:
                session.advance(self._rounds)
            pieces = read_texts(session, {0: text})[0]
            first = pieces[0][0] if pieces else text.count
            origins = session.origins(first)
            if params.detokenize:
                yield [(piece, PLAIN if origins is None else origins[0][i - first]) for i, piece in pieces]
        self.generation = generations(session, {0: text})[0]


def stream(
    model: Model,
    prompt: Any,
    *,
    max_tokens: int | None = None,
    sampling: SamplingParams | None = None,
    drafter: str | Drafter | DrafterPlan | None = None,
    verifier: str | Verifier | None = None,
    seed: int | None = None,
    rounds: int = 4,
    **fields: Any,
) -> Stream:
    """`generate` for one prompt, as an iterator over text pieces (never half a character). See `Stream`.

    A piece is the text of `rounds` rounds: 1 gives text as soon as it is there, more cost less. `.tokens()` of the
    result gives it token by token.
    """
    if not isinstance(rounds, int) or not 1 <= rounds <= NOTED_ROUNDS:
        raise UserError(f"rounds={rounds!r} must be a whole number from 1 to {NOTED_ROUNDS}")
    params = _params(model, sampling, max_tokens, fields)
    prompts, many = _prompts(prompt)
    if many or params.num_sequences > 1:
        raise UserError("stream takes one prompt and n=1; use generate for more")
    method = make_method(model, drafter, verifier, params)
    [sequence] = _sequences(prompt_ids(model, prompts[0], params), params, _seed(seed))
    return Stream(Session(model, [sequence], method, noting=bool(params.stop)), rounds)


def make_method(
    model: Model, drafter: str | Drafter | DrafterPlan | None, verifier: str | Verifier | None, params: SamplingParams
) -> Method:
    """The method of a drafter and a verifier, refused where the pair does not keep its promise.

    A drafter that needs a model is bound to `model` here; its draft model is loaded the first time. A name, or a plan
    that says nothing of how long drafts are, drafts no more than pays (`policies.default_policy`).
    """
    if isinstance(drafter, str) and drafter == "none":
        drafter = None
    if drafter is None:
        if verifier is not None:
            raise UserError("a verifier needs a drafter: give drafter=prompt_lookup, or leave the verifier out")
        return Method()
    name = drafter if isinstance(drafter, str) else None
    drafter = drafter if name is None else get_drafter(name)
    if not isinstance(drafter, Drafter | DrafterPlan):
        raise UserError(f"drafter must be a registered name or a Drafter, not {type(drafter).__name__}")
    temperature = 0.0 if params.greedy else params.temperature
    verifier = choose_verifier(drafter, verifier, temperature=temperature)
    if isinstance(drafter, Drafter):
        own = drafter if name is None else _that_pays(model, drafter, name, 0.0)
        return Method(own, verifier)
    bound = bind(model, drafter)
    free = name is not None or drafter.style.free
    own = _that_pays(model, bound.drafter, name, draft_share(model, bound)) if free else bound.drafter
    return Method(own, verifier, bound.weights)


def bind(model: Model, plan: DrafterPlan) -> Bound:
    """The drafter of a plan for this target; what it needs is loaded once, whatever the policy."""
    key = plan.under(Fixed(1))
    if key not in model.drafters:
        if not plan.on_mesh:
            model.check_whole("the drafter with these options")
        model.drafters[key] = plan.prepare(model, MakeModel(partial(_load_draft, model), with_fewer_neurons))
    return model.drafters[key].under(plan.style.policy)


def _that_pays(model: Model, drafter: Drafter, name: str | None, share: float) -> Drafter:
    """The drafter under the default policy. `share`: time to draft a token in plain steps, where none was kept."""
    gamma = drafter.max_nodes if drafter.tree else SHORT_GAMMA
    times = policy_times(model, gamma, name, share=share, levels=drafter.max_depth if drafter.tree else None)
    return with_policy(drafter, default_policy(times, gamma=gamma, tree=drafter.tree))


def _load_draft(target: Model, spec: str) -> Model:
    """A draft model beside its target: on the same kernels and, of a mesh, on every device."""
    draft = load(spec, backend=target.kernels.name, kv_dtype=target.kv_dtype)
    draft.params = target.everywhere(draft.params)
    return draft


def _params(model: Model, sampling: SamplingParams | None, max_tokens: int | None, fields: dict) -> SamplingParams:
    if not isinstance(model, Model):
        raise UserError(f"the first argument is a Model, from specsparse.load(...), not {type(model).__name__}")
    if not isinstance(sampling, SamplingParams | None):
        raise UserError(f"sampling must be SamplingParams, not {type(sampling).__name__}")
    params = SamplingParams(temperature=0.0, max_tokens=None) if sampling is None else sampling
    if max_tokens is not None:
        fields = {**fields, "max_tokens": max_tokens}
    return params.merged(**fields) if fields else params


def _every_params(
    model: Model, sampling: Any, max_tokens: int | None, fields: dict, count: int, many: bool
) -> list[SamplingParams]:
    """The parameters of each prompt: the same for all, or one of a list each."""
    if not isinstance(sampling, list | tuple):
        return [_params(model, sampling, max_tokens, fields)] * count
    if not many or len(sampling) != count:
        prompts = f"{count} prompts" if many else "one prompt that is in no list"
        raise UserError(f"sampling is a list of {len(sampling)} for {prompts}: give one for each, or one for all")
    return [_params(model, one, max_tokens, fields) for one in sampling]


def _seed(seed: Any) -> int:
    """The seed, or a new one for None."""
    if seed is None:
        return secrets.randbits(32)
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise UserError(f"seed={seed!r} must be a whole number, or None for a new one")
    return int(seed)


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts and whether a list was given. A list of integers or of chat messages is one prompt."""
    if isinstance(prompt, str | np.ndarray):
        return [prompt], False
    if not isinstance(prompt, Seq):
        raise UserError(f"a prompt is a text, token ids or a chat, not {type(prompt).__name__}")
    if not prompt:
        raise UserError("the prompt is empty: at least one token is needed")
    if isinstance(prompt[0], str | Seq | np.ndarray):
        return list(prompt), True
    return [prompt], False


def prompt_ids(model: Model, prompt: Any, params: SamplingParams) -> np.ndarray:
    """Checked ids int32[n] of a text, a chat or ids. Texts may name special tokens; BOS is added as the file says."""
    tokenizer = model.tokenizer
    if isinstance(prompt, Seq) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
        prompt = tokenizer.apply_chat_template(prompt)
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        if len(ids) > 1 and tokenizer.add_bos and ids[0] == ids[1] == tokenizer.bos_id:
            ids = ids[1:]  # a chat template has written BOS already
    else:
        ids = prompt
    keep = params.truncate_prompt_tokens
    if keep is not None:
        ids = ids[-(_room_for_prompt(model, params) if keep == -1 else keep) :]
    return model.check_ids(ids)


def _room_for_prompt(model: Model, params: SamplingParams) -> int:
    """Tokens that the context has beside the `max_tokens` to come, or beside one where they are not limited."""
    context = model.config.context_length
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted >= context:
        raise UserError(
            f"max_tokens={wanted} leaves truncate_prompt_tokens=-1 no prompt: the context holds {context} tokens"
        )
    return context - wanted
