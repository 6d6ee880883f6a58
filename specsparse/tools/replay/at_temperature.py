"""The target's laws of a recording at another temperature."""

import dataclasses

import numpy as np

from specsparse.engine.sampling.params import GREEDY_TEMPERATURE
from specsparse.errors import UserError
from specsparse.measure.recording import Recording
from specsparse.support.files import Json

MOST_REST = 1e-3
"""Most mass that may lie beyond the recorded tokens of a law at either temperature."""


def at_temperature(recording: Recording, temperature: float) -> Recording:
    """p at another temperature: p^(T / T') at the recorded tokens; what lies beyond them must hardly count.

    Their mass counts as one token's, the most it can come to where the law gets colder and the least where it gets
    hotter. The recorded target tokens are drawn anew.

    Raises:
        UserError: a greedy or truncated record, a temperature of 0, or too much mass beyond the recorded tokens.
    """
    about: Json = recording.about
    why, power = None, about["temperature"] / max(temperature, GREEDY_TEMPERATURE)
    if about["temperature"] == 0:
        why = "it was greedy"
    elif about["truncated"]:
        why = "p was truncated"
    elif temperature < GREEDY_TEMPERATURE:
        why = "it must be above 0"
    elif (rest := _most_rest(recording, power)) > MOST_REST:
        why = f"up to {rest:.1%} of p may lie beyond the recorded tokens; record more of them"
    if why:
        raise UserError(f"temperature={temperature:g} cannot be had from this record: {why}")
    p = recording.p.astype(np.float64) ** power
    tail = np.where(_beyond(recording) > 0, recording.p_rest.astype(np.float64) ** power, 0.0)
    mass = p.sum(axis=2) + tail
    safe = np.where(mass > 0, mass, 1.0)
    rng = np.random.default_rng(0)  # the recorded ones are draws of another law
    cdf = np.cumsum(p / safe[..., None], axis=2)
    columns = (cdf < rng.random(cdf.shape[:2])[..., None]).sum(axis=2)
    inside = np.minimum(columns, p.shape[2] - 1)
    targets = np.where(columns < p.shape[2], np.take_along_axis(recording.ids, inside[..., None], axis=2)[..., 0], -1)
    return dataclasses.replace(
        recording,
        about={**about, "temperature": temperature},
        p=p / safe[..., None],
        p_rest=tail / safe,
        targets=targets.astype(np.int32),
    )


def _most_rest(recording: Recording, power: float) -> float:
    """The largest share of a law that may lie beyond the recorded tokens, as recorded or as its `power`.

    n tokens of mass m have at most n (m / n)^power = n^(1 - power) m^power where power < 1: all alike.
    """
    exists = np.arange(recording.p.shape[1])[None] <= recording.count[:, None]
    rest = recording.p_rest.astype(np.float64)
    most = rest**power * _beyond(recording) ** max(0.0, 1 - power)
    kept = np.where(exists, (recording.p.astype(np.float64) ** power).sum(axis=2), 1.0)
    share = np.divide(most, kept + most, out=np.zeros_like(most), where=most > 0)
    return float(np.where(exists, np.maximum(rest, share), 0).max())


def _beyond(recording: Recording) -> np.ndarray:
    """float64[R, K+1]: tokens of the vocabulary that a row does not keep."""
    return recording.about["vocab"] - (recording.ids >= 0).sum(axis=2, dtype=np.float64)
