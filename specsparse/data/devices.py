"""Peaks of devices by their makers' sheets: `devices.yaml` beside this file, read without jax."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from specsparse.errors import UserError
from specsparse.support.options import nearest

THIS = "this"
"""The name of this machine, which is measured."""
GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True)
class Device:
    """Peaks of a device. All above 0, but for `dispatch`."""

    name: str  # as in configs
    title: str  # what it is
    bandwidth: float  # bytes read from memory per second
    f32: float  # multiply-adds per second, dense
    f16: float | None = None  # None if the device gains nothing over the next wider type
    int8: float | None = None  # the same
    memory: float | None = None  # bytes it holds; None: unknown
    link: float | None = None  # bytes per second one way to the host's memory; None: it is the host's own
    dispatch: float = 0.0  # seconds that a kernel takes beside its work
    overlap: float = 1.0  # share of the shorter of reading and arithmetic that hides behind the longer
    source: str = ""  # of the figures; `measured` if they are this machine's own, not a sheet's
    measured: bool = False

    def peak(self, kind: str) -> float:
        """Multiply-adds per second of `kind`, "int8", "f16" or "f32", or the next wider the device has."""
        wider = {"int8": (self.int8, self.f16, self.f32), "f16": (self.f16, self.f32), "f32": (self.f32,)}
        return next(rate for rate in wider[kind] if rate is not None)

    def reaching(self, memory: float, arithmetic: float) -> "Device":
        """The device with those shares of its bandwidth and of its arithmetic."""
        rates = {kind: None if (rate := getattr(self, kind)) is None else rate * arithmetic for kind in KINDS}
        return dataclasses.replace(self, bandwidth=self.bandwidth * memory, **rates)


KINDS = ("f32", "f16", "int8")
"""Types of multiply-adds, from the widest."""


@functools.cache
def sheets() -> Mapping[str, Device]:
    """All named devices, in the order of the file, which has GB/s, 10^12 operations a second, GB and microseconds."""
    given = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return MappingProxyType({name: _device(name, **sheet) for name, sheet in given.items()})


def _device(
    name: str, title: str, bandwidth: float, tera: Mapping[str, float], memory: float, source: str,
    link: float | None = None, dispatch: float = 0.0, overlap: float = 1.0,
) -> Device:  # fmt: skip
    """A sheet in bytes, multiply-adds (two operations each) and seconds."""
    rates: dict[str, Any] = {kind: rate * TERA / 2 for kind, rate in tera.items()}
    return Device(
        name, title, bandwidth * GIGA, **rates, memory=memory * GIGA, link=None if link is None else link * GIGA,
        dispatch=dispatch * MICRO, overlap=overlap, source=" ".join(source.split()),
    )  # fmt: skip


def known(name: str) -> str:
    """The name itself, or UserError for an unknown one, with the nearest."""
    if name != THIS and name not in sheets():
        raise UserError(f"device {name} is unknown{nearest(name, (THIS, *sheets()))}")
    return name
