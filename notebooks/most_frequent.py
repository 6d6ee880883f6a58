"""A drafter in plain Python, outside the package: notebook 06 begins with it."""

from collections import Counter
from itertools import pairwise

from specsparse import ListDrafter


class MostFrequent(ListDrafter):
    """After each token, the one that has followed it most often so far."""

    def propose(self, tokens: list[int], limit: int) -> list[int]:
        followers, draft = Counter(pairwise(tokens)), tokens[-1:]
        while len(draft) <= limit:
            after = {b: n for (a, b), n in followers.items() if a == draft[-1]}
            if not after:
                break
            draft.append(max(after, key=after.__getitem__))
        return draft[1:]
