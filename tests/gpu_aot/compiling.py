"""Programs compiled for an H200 that is not there, and what the compiler says of them."""

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGET = Path(__file__).with_name("h200.txtpb")
"""XLA's description of the card; a real one writes its own with --xla_dump_to."""


def why_not() -> str:
    """Why nothing can be compiled here, or ""."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax's CUDA plugin is not installed"
    if jax.default_backend() != "cpu":
        return "a card is here: run the suite on it"
    return ""


@dataclass(frozen=True)
class Registers:
    """Of one kernel, as the assembler says: registers a thread, and bytes that did not fit."""

    name: str
    used: int
    spilled: int


def device_mesh() -> Mesh:
    """One H200."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    return Mesh(np.array(topology.devices), ("card",))


def lowered(function: Callable, args: tuple, mesh: Mesh, donate: tuple[int, ...] = ()):
    """The program lowered for the card, not compiled."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placed(a):
        return jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=everywhere)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas asks for it
        traced = jax.jit(function, donate_argnums=donate).trace(*jax.tree.map(placed, args))
        return traced.lower(lowering_platforms=("cuda",))


def registers(text: str) -> list[Registers]:
    """From what `ptxas --verbose` prints."""
    found = []
    pattern = re.compile(
        r"Compiling entry function '(\S+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.DOTALL,
    )
    for name, _, stores, loads, used in pattern.findall(text):
        found.append(Registers(name, int(used), int(stores) + int(loads)))
    return found
