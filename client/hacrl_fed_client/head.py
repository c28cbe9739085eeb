"""Log-probs of tokens from hidden states, a chunk of tokens at a time: logits of all of them are never in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# Tokens whose logits are in memory at once: 78 MB of float32 for a vocabulary of 152 k.
CHUNK = 128


def head_logps(head: torch.nn.Module, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
    """Log-probs (N,) of the tokens ``targets_N``, in nats, where ``head`` makes logits of hidden states.

    The softmax is in float32, or in the logits' type where that is wider. The gradient's softmax is computed anew, which
    costs a third more arithmetic than keeping it would.
    """
    if type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter:
        return _linear_logps(hidden_NH, head.weight, head.bias, targets_N)
    # An adapter or quantised weights: their own forward, whose few trained weights get their gradient chunk by chunk.
    chunks = zip(torch.split(hidden_NH, CHUNK), torch.split(targets_N, CHUNK), strict=True)
    return torch.cat([checkpoint(_module_logps, head, *chunk, use_reentrant=False) for chunk in chunks])


def logits_logps(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Log-probs (N,) of the tokens ``targets_N`` from logits (N, V), in nats; the softmax is in float32 or wider."""
    return -functional.cross_entropy(_widened(logits_NV), targets_N, reduction="none")


def _module_logps(head: torch.nn.Module, hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
    return logits_logps(head(hidden_NH), targets_N)


def _linear_logps(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor) -> Tensor:
    device = hidden_NH.device.type
    # As autocast would, but once and not for each chunk.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VH.dtype
    logps_N: Tensor = _LinearLogps.apply(hidden_NH, weight_VH, bias_V, targets_N, dtype)  # type: ignore[no-untyped-call]
    return logps_N


class _LinearLogps(torch.autograd.Function):
    """log softmax(W h + b)[target] for each row h; arithmetic of W h in ``dtype``.

    With p = softmax(W h + b), the gradient with respect to W h + b is onehot(target) - p.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_N: Tensor, dtype: torch.dtype
    ) -> Tensor:
        weight, bias = _cast(weight_VH, bias_V, dtype)
        logps, log_sums = [], []
        for hidden, targets in zip(torch.split(hidden_NH, CHUNK), torch.split(targets_N, CHUNK), strict=True):
            logits = _widened(functional.linear(hidden.to(dtype), weight, bias))
            log_sums.append(logits.logsumexp(-1))
            logps.append(logits.gather(-1, targets[:, None]).squeeze(-1) - log_sums[-1])
        ctx.dtype = dtype
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, torch.cat(log_sums))
        return torch.cat(logps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, log_sums_N = ctx.saved_tensors
        weight, bias = _cast(weight_VH, bias_V, ctx.dtype)
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        grad_bias_V = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] else None
        for start in range(0, len(hidden_NH), CHUNK):
            chunk = slice(start, start + CHUNK)
            hidden, grad = hidden_NH[chunk].to(ctx.dtype), grad_N[chunk, None]
            softmax = _widened(functional.linear(hidden, weight, bias)).sub_(log_sums_N[chunk, None]).exp_()
            grad_logits = softmax.mul_(-grad).scatter_add_(1, targets_N[chunk, None], grad)
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(0)
            grad_logits = grad_logits.to(ctx.dtype)
            if grad_hidden_NH is not None:
                grad_hidden_NH[chunk] = grad_logits @ weight
            if grad_weight_VH is not None and grad_weight_VH.dtype == ctx.dtype:
                grad_weight_VH.addmm_(grad_logits.T, hidden)
            elif grad_weight_VH is not None:
                grad_weight_VH += grad_logits.T @ hidden
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None


def _cast(weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
