"""What every FFN of a model reads over texts, in files that a restart finds again."""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from specsparse.engine.model import Model
from specsparse.errors import UserError
from specsparse.kernels.packing.dequant import embed_rows
from specsparse.support.files import write_tensors
from specsparse.training import ffn_model
from specsparse.training.data import Text
from specsparse.training.ffn_model import FfnMatrices, FrozenLayers, PackedTexts

_PART = 8
"""Windows of a file."""


def collect(
    model: Model,
    windows: Sequence[Sequence[Text]],
    folder: Path,
    *,
    rows: int,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Files of the normalised inputs float16[L, n, D] of every FFN; those that are there are not made again.

    Args:
        model: the original, dense.
        windows: texts that share a window, see `training.windows.pack`.
        folder: of the files.
        rows: of a window.
        progress: called with the windows done.
    """
    paths = [folder / f"inputs_{i:04d}.safetensors" for i in range(-(-len(windows) // _PART))]
    program, arguments = None, ()
    for i, path in enumerate(paths):
        part = windows[i * _PART : (i + 1) * _PART]
        if not path.exists():
            if program is None:
                program = _program(model)
                arguments = model.params.embedding, ffn_model.frozen_layers(model, rows), ffn_model.ffns_of(model)
            packed = [ffn_model.pack_texts(texts, rows) for texts in part]
            found = [np.asarray(program(*arguments, p))[:, p.text >= 0] for p in packed]
            write_tensors(path, {"z": np.concatenate(found, axis=1)}, {"format": "specsparse.training.inputs"})
        if progress is not None:
            progress(i * _PART + len(part))
    return paths


def layer_inputs(paths: Sequence[Path], layer: int) -> np.ndarray:
    """float16[n, D]: what layer `layer` reads, over all files.

    Raises:
        UserError: a damaged file.
    """
    found = []
    for path in paths:
        try:
            with safe_open(path, framework="numpy") as file:
                found.append(file.get_slice("z")[layer])
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: cannot be read ({error}); remove it to have it made again") from error
    return np.concatenate(found)


def _program(model: Model) -> Callable:
    config = model.config

    def inputs(embedding, frozen: FrozenLayers, ffn: FfnMatrices, texts: PackedTexts):
        x_nD = embed_rows(embedding, texts.tokens)
        return ffn_model.forward(config, frozen, ffn, x_nD, texts, jax.nn.silu, lambda z, a: z.astype(jnp.float16))[1]

    return jax.jit(inputs)
