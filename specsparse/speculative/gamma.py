"""How many tokens a round drafts: `max_nodes` inside; outside it is gamma, or what other projects call it."""

from typing import Annotated

from specsparse.support.options import Also, Range

SHORT_GAMMA = 4
"""Most tokens that a round drafts where nobody says how many: more of them cost more than they bring on most texts."""
DEFAULT_GAMMA = 7
"""Of a policy: 8 positions a forward pass."""
MAX_GAMMA = 512
"""Most tokens a round may draft."""
MAX_NODES = 64
"""Most nodes of a tree: what one verifying forward may hold."""
GAMMA_NAMES = (
    "gamma",
    "num_speculative_tokens",
    "draft_max",
    "num_assistant_tokens",
    "prompt_lookup_num_tokens",
    "n_draft",
)
"""Everybody's names of that number."""

MaxNodes = Annotated[int, Range(1, MAX_GAMMA), Also(*GAMMA_NAMES)]
"""Most tokens of a draft, as an option."""
