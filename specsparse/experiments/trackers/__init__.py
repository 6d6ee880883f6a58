"""Trackers by name: they follow a run beside its files, which are always written."""

from typing import TYPE_CHECKING

from specsparse.support.registry import Registry

if TYPE_CHECKING:
    from specsparse.experiments.trackers.base import Tracker

TRACKERS: "Registry[Tracker]" = Registry(
    "tracker",
    "specsparse.experiments.trackers.base:Tracker",
    "specsparse.experiments.trackers",
    {"jsonl": "base:Jsonl", "wandb": "wandb:Wandb"},
)
