"""What the plans of published heads share: whether a head is one for the target, and the output matrix it scores by."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from specsparse.engine.model import Model
from specsparse.engine.weights import pack_matrix
from specsparse.errors import UserError
from specsparse.speculative.drafters.heads.published_file import EMBEDDING, OUTPUT, PublishedHead
from specsparse.speculative.drafters.plan import DrafterPlan, Drafting, Load
from specsparse.speculative.drafters.sources import DraftWeights
from specsparse.support.options import instance_of


@dataclasses.dataclass(frozen=True)
class PublishedPlan(DrafterPlan):
    """Base of the plans of heads that other projects publish.

    Attributes:
        path: its folder (config.json and safetensors, or pytorch_model.bin of EAGLE-3), a GGUF file, hf://owner/repo,
            or a name of the catalogue.
        reader: `module:function` that reads it.
    """

    reader: ClassVar[str]

    path: Annotated[
        PublishedHead | str | Path | None, instance_of("a folder, a GGUF file or a name", PublishedHead, str, Path)
    ] = None

    def check(self) -> None:
        """Its path is needed."""
        if self.path is None or self.path == "":
            raise UserError(
                "drafter.path: a value is needed, the head's folder or GGUF file, hf://owner/repo or a name of "
                "`python -m specsparse models`"
            )

    def head_file(self, load: Load) -> Any:
        """The head as its file describes it; what it asks for and does not get is said on stderr."""
        if not isinstance(self.path, str | Path):
            return self.path
        file = load(self.reader, str(self.path))
        if isinstance(file, PublishedHead) and file.accept_k > 1:
            print(
                f"note: {file.path} asks for verifier_accept_k={file.accept_k}, which is lossy: the verifier here is "
                "verifier=..., and drafts are verified as it says",
                file=sys.stderr,
            )
        return file

    @property
    def files(self) -> Mapping[str, str]:
        """The head; one of the Hub is fetched when it is loaded."""
        return {"path": self.path} if isinstance(self.path, str) and not self.path.startswith("hf://") else {}


def check_target(file: PublishedHead, target: Model, *, layers: Sequence[int], width: int) -> None:
    """Whether a head is one for that target.

    Args:
        file: the head.
        target: the model.
        layers: ids of the target's layers whose incoming rows it reads.
        width: of one of these rows.

    Raises:
        UserError: it was made for a model of other shapes or another vocabulary.
    """
    c, own = target.config, [name for name in (EMBEDDING, OUTPUT) if name in file.tensors]
    if width != c.d_model or (file.shape.width != c.d_model and len(own) < 2):
        raise UserError(
            f"{file.path}: is for a target of width {width} (its own is {file.shape.width}), {target.path.name} has "
            f"{c.d_model}"
        )
    outside = [layer for layer in layers if not 0 <= layer <= c.n_layers]
    if outside:
        raise UserError(
            f"{file.path}: reads the target's features at layer {outside[0]}; {target.path.name} has layers 0 to "
            f"{c.n_layers - 1}, and {c.n_layers} for what comes out"
        )
    if EMBEDDING in own and file.tensors[EMBEDDING][0] < c.vocab_size:
        raise UserError(f"{file.path}: embeds {file.tensors[EMBEDDING][0]} ids, {target.path.name} has {c.vocab_size}")
    if file.ids is not None and file.ids.max() >= c.vocab_size:
        raise UserError(f"{file.path}: drafts id {file.ids.max()}, {target.path.name} has {c.vocab_size} ids")
    if file.ids is None and OUTPUT in own and file.tensors[OUTPUT][0] < c.vocab_size:
        raise UserError(
            f"{file.path}: scores {file.tensors[OUTPUT][0]} ids without saying which (no d2t); {target.path.name} has "
            f"{c.vocab_size}"
        )


def scored(file: PublishedHead, style: Drafting, target: Model, *, floats: bool) -> tuple[DraftWeights, int]:
    """The output matrix, its ids where they are not all, and how many columns logits have."""
    vocab, own = target.config.vocab_size, OUTPUT in file.tensors
    output = pack_matrix(file.load(OUTPUT), floats=floats) if own else target.params.output
    if own and (file.ids is not None or output.shape[0] > vocab):
        return style.trim(target, output, vocab, rows=np.arange(vocab) if file.ids is None else file.ids)
    if file.ids is not None and style.draft_vocab is None:
        style = dataclasses.replace(style, draft_vocab=tuple(file.ids.tolist()))
    weights, columns = style.trim(target, output, vocab)
    return weights if weights.head is not None else weights._replace(head=output), columns
