"""A rejection sampler in torch with the arguments and shapes of vLLM's, certified. Replace `rejection_sample` by yours.

    cd experiments; ../.venv/bin/python -m specsparse certify certify_vllm_shapes:VERIFIER

It needs torch and numpy, no jax. vLLM lays the drafts of all requests behind each other: T tokens in all, `cu_num` the
running number of them. The bonus token is sampled outside and handed over.
"""

import torch

from specsparse import ExternalVerifier

PLACEHOLDER = -1


def sample(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """int64[R], a token of each row float[R, V] by inverse CDF of float[R]."""
    cdf = weights.cumsum(dim=-1)
    below = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(dim=-1)
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(below, last)


def rejection_sample(
    draft_token_ids: torch.Tensor,  # int64[T]
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,  # int64[N]
    draft_probs: torch.Tensor,  # float[T, V]
    target_probs: torch.Tensor,  # float[T, V]
    bonus_token_ids: torch.Tensor,  # int64[N, 1]
    uniform_probs: torch.Tensor,  # float[T]
    recovery_probs: torch.Tensor,  # float[N]
) -> torch.Tensor:
    """int64[N, max_spec_len + 1], output tokens, padded with `PLACEHOLDER`."""
    N = len(cu_num_draft_tokens)
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1))
    request = torch.repeat_interleave(torch.arange(N), counts)
    at = draft_token_ids[:, None]
    accepted = uniform_probs * draft_probs.gather(1, at)[:, 0] < target_probs.gather(1, at)[:, 0]
    residual = (target_probs - draft_probs).clamp(min=0)
    residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target_probs)
    recovered = sample(residual, recovery_probs[request])
    output = torch.full((N, max_spec_len + 1), PLACEHOLDER)
    for n in range(N):  # vLLM: one Triton program a request
        start, end = int(cu_num_draft_tokens[n] - counts[n]), int(cu_num_draft_tokens[n])
        refused = torch.nonzero(~accepted[start:end])
        kept = int(refused[0]) if len(refused) else end - start
        output[n, :kept] = draft_token_ids[start : start + kept]
        output[n, kept] = recovered[start + kept] if len(refused) else bonus_token_ids[n, 0]
    return output


def verify(p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Our arguments, p [N, K+1, V], q [N, K, V], drafts [N, K] and uniforms [N, 2K+1], in vLLM's shapes."""
    (N, K), V = drafts.shape, p.shape[-1]
    bonus = sample(p[:, K], uniforms[:, -1])[:, None]
    cu_num = K * torch.arange(1, N + 1)
    flat = drafts.reshape(-1), K, cu_num, q.reshape(N * K, V), p[:, :K].reshape(N * K, V)
    return rejection_sample(*flat, bonus, uniforms[:, :K].reshape(-1), uniforms[:, K])


VERIFIER = ExternalVerifier(verify, arrays="torch", batched=True, samples=20_000)
