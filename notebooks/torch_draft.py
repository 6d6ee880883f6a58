"""A torch module's logits as a drafter, outside the package (docs/drafters.md)."""

import torch

from specsparse import ListDrafter


class TorchDraft(ListDrafter):
    """The most likely tokens of a module: ids int64[1, n] -> logits [1, n, V] over the target's ids."""

    module = torch.nn.Sequential(torch.nn.Embedding(49152, 8), torch.nn.Linear(8, 49152))  # yours

    @torch.inference_mode()
    def propose(self, tokens: list[int], limit: int) -> list[int]:
        ids = torch.tensor([tokens])
        for _ in range(limit):
            ids = torch.cat([ids, self.module(ids)[:, -1:].argmax(-1)], dim=1)
        return ids[0, len(tokens) :].tolist()
