"""From a model, a drafter and a verifier to a `Method`; what a drafter needs is loaded once."""

import sys
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from specsparse.engine.model import Model
from specsparse.engine.sampling.params import SamplingParams
from specsparse.errors import UserError
from specsparse.models import obtain
from specsparse.runtime.device_batch import Method
from specsparse.runtime.load import load
from specsparse.runtime.timing_cache import draft_share, policy_times
from specsparse.speculative.base import Drafter, Verifier, check_facts
from specsparse.speculative.drafters.plan import Bound, DrafterPlan, MakeModel
from specsparse.speculative.drafters.registry import get_drafter
from specsparse.speculative.drafters.with_policy import with_policy
from specsparse.speculative.gamma import SHORT_GAMMA
from specsparse.speculative.method import choose_verifier, drawing_for
from specsparse.speculative.policies import default_policy
from specsparse.speculative.policies.base import Fixed
from specsparse.speculative.verifiers.registry import same_text

if TYPE_CHECKING:
    from specsparse.speculative.drafters.heads.dflash_file import DFlashFile
    from specsparse.speculative.drafters.heads.eagle3_file import Eagle3File

Head = TypeVar("Head", "Eagle3File", "DFlashFile")
AnyDrafter = str | Drafter | DrafterPlan | None
"""A registered name, a drafter, a plan of one, or none."""
AnyVerifier = str | Verifier | None
"""A registered name, a verifier, or what fits the drafter."""


def make_method(
    model: Model, drafter: AnyDrafter, verifier: AnyVerifier, params: SamplingParams, *, batch: int = 1
) -> Method:
    """The method of a drafter and a verifier, refused where the pair does not keep its promise.

    A drafter that needs a model is bound to `model` here; its draft model is loaded the first time. A name, or a plan
    that says nothing of how long drafts are, drafts no more than pays (`policies.default_policy`) in a batch of so
    many sequences. Where a text depends on how long its drafts were (`verifier=token` and the like), what pays a
    single sequence decides, so that a sequence is written in a batch as it is alone.
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
    drafter = drawing_for(drafter, verifier, temperature)
    verifier = choose_verifier(drafter, verifier, temperature=temperature)
    batch = batch if same_text(verifier.name) else 1
    if isinstance(drafter, Drafter):
        own = drafter if name is None else _that_pays(model, drafter, name, 0.0, batch)
        return Method(own, verifier)
    bound = bind(model, drafter)
    free = name is not None or drafter.style.free
    own = _that_pays(model, bound.drafter, name, draft_share(model, bound), batch) if free else bound.drafter
    return Method(own, verifier, bound.weights)


def ready(
    model: Model, drafter: AnyDrafter, verifier: AnyVerifier, params: SamplingParams, *, batch: int = 1
) -> tuple[Model, Method]:
    """The model, of an automatic width one that holds the drafts (`Model.holding`), and `make_method` on it."""
    if model.narrow is not None and isinstance(drafter, str | Drafter | DrafterPlan):
        model = model.holding(rows_of(drafter))
    return model, make_method(model, drafter, verifier, params, batch=batch)


def rows_of(drafter: AnyDrafter) -> int:
    """Most rows of a step with this drafter; plain decoding has one."""
    if drafter is None or drafter == "none":
        return 1
    made = get_drafter(drafter) if isinstance(drafter, str) else drafter
    if isinstance(made, Drafter):
        check_facts(made)
    return 1 + made.max_nodes


def bind(model: Model, plan: DrafterPlan) -> Bound:
    """The drafter of a plan for this target; what it needs is loaded once, whatever the policy."""
    key = plan.under(Fixed(1))
    if key not in model.drafters:
        if not plan.on_mesh:
            model.check_whole("the drafter with these options")
        from specsparse.powerinfer.fewer import (
            with_fewer_neurons,  # what drafts loads; plain decoding does not wait
        )

        load_draft = partial(_load_draft, model)
        make = MakeModel(load_draft, with_fewer_neurons, eagle3=published_eagle3, dflash=published_dflash)
        model.drafters[key] = plan.prepare(model, make)
    return model.drafters[key].under(plan.style.policy)


def _that_pays(model: Model, drafter: Drafter, name: str | None, share: float, batch: int) -> Drafter:
    """The drafter under the default policy. `share`: time to draft a token in plain steps, where none was kept."""
    gamma = drafter.max_nodes if drafter.tree else SHORT_GAMMA
    levels = drafter.max_depth if drafter.tree else None
    times = policy_times(model, gamma, name, share=share, levels=levels, batch=batch)
    return with_policy(drafter, default_policy(times, gamma=gamma, tree=drafter.tree))


def published_eagle3(spec: str) -> "Eagle3File":
    """The EAGLE-3 head of a path, a name of the catalogue or a reference to the Hub."""
    from specsparse.models.convert.eagle3 import read_eagle3

    return _told(read_eagle3(obtain.published(spec)))


def published_dflash(spec: str) -> "DFlashFile":
    """The DFlash drafter of a path, a name of the catalogue or a reference to the Hub."""
    from specsparse.models.convert.dflash import read_dflash

    return _told(read_dflash(obtain.published(spec)))


def _told(file: Head) -> Head:
    """The head; what its file asks for and does not get is said on stderr."""
    if file.accept_k > 1:
        print(
            f"note: {file.path} asks for verifier_accept_k={file.accept_k}, which is lossy: the verifier here is "
            "verifier=..., and drafts are verified as it says",
            file=sys.stderr,
        )
    return file


def _load_draft(target: Model, spec: str) -> Model:
    """A draft model beside its target: on the same kernels and, of a mesh, on every device."""
    kv_dtype = "f16" if target.kv_dtype == "q8_0" else target.kv_dtype  # heads of any size
    draft = load(spec, backend=target.kernels.name, kv_dtype=kv_dtype, width=0)
    draft.params = target.everywhere(draft.params)
    return draft
