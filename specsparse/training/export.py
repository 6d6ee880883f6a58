"""A trained head as the tensors of its file."""

import jax
import numpy as np

from specsparse.speculative.drafters import head_file
from specsparse.training.head import HeadWeights


def tensors(weights: HeadWeights) -> dict[str, np.ndarray]:
    """float32 tensors by their names in the file; `fc` as its two halves."""
    host = jax.tree.map(lambda x: np.asarray(x, np.float32), weights)
    hidden, token = np.split(host.fc, 2, axis=1)
    layer = {f"blk.0.{name}.weight": getattr(host.layer, name) for name in head_file.LAYER_MATRICES}
    norms = {f"blk.0.{name}.weight": getattr(host.layer, name) for name in ("attn_norm", "ffn_norm")}
    own = {f"{name}.weight": getattr(host, name) for name in head_file.NORMS}
    return {"fc_hidden.weight": hidden, "fc_token.weight": token, **layer, **norms, **own}
