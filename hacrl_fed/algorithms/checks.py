"""Checks of the library's arguments: each raises ValueError that names the argument."""

from collections.abc import Sequence

import torch
from torch import Tensor


def token_mask(target_logps: Tensor, mask: Tensor) -> Tensor:
    """The mask (B, T) as bool, after checks of both: log-probs that are finite under it, a token in each row."""
    if not isinstance(target_logps, Tensor):
        raise ValueError(f"target_logps must be a tensor, not {type(target_logps).__name__}")
    if target_logps.dtype not in (torch.float32, torch.float64):
        # Half precision resolves a ratio near 1 to 1e-3 at best; the clip range of own rollouts is a third of that.
        raise ValueError(f"target_logps must be float32 or float64, not {target_logps.dtype}")
    if target_logps.ndim != 2 or not len(target_logps):
        raise ValueError(f"target_logps must have shape (B, T) with at least one row, not {tuple(target_logps.shape)}")
    mask_BT = flags("mask", mask, target_logps.shape, target_logps.device)
    if not bool(mask_BT.any(-1).all()):
        raise ValueError("mask must keep at least one token of each row")
    finite("target_logps", target_logps.detach()[mask_BT])
    return mask_BT


def token_logps(name: str, logps: Tensor, target_logps: Tensor, mask_BT: Tensor) -> Tensor:
    """Other log-probs (B, T) of the same tokens, without gradient, in the dtype and on the device of the target's."""
    logps_BT = tensor(name, logps).detach().to(target_logps)
    shape(name, logps_BT, target_logps.shape)
    finite(name, logps_BT[mask_BT])
    return logps_BT


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean (B,) over the tokens of each row; what is under the mask is not read."""
    return torch.where(mask_BT, values_BT, 0).sum(-1) / mask_BT.sum(-1)


def vector(name: str, values: Tensor | Sequence[float], dtype: torch.dtype) -> Tensor:
    """Finite numbers (B,)."""
    as_tensor = tensor(name, values, dtype)
    if as_tensor.ndim != 1:
        raise ValueError(f"{name} must have one dimension, not shape {tuple(as_tensor.shape)}")
    finite(name, as_tensor)
    return as_tensor


def rewards(values: Tensor | Sequence[float]) -> Tensor:
    """Rewards (B,) of one rollout or more."""
    rewards_B = vector("rewards", values, torch.float64)
    if not len(rewards_B):
        raise ValueError("rewards must hold at least one rollout")
    return rewards_B


def integers(name: str, values: Tensor | Sequence[float], count: int, device: torch.device) -> Tensor:
    """Integers (count,)."""
    as_tensor = tensor(name, values).to(device)
    if as_tensor.dtype == torch.bool or as_tensor.is_floating_point() or as_tensor.is_complex():
        raise ValueError(f"{name} must hold integers, not {as_tensor.dtype}")
    shape(name, as_tensor, (count,))
    return as_tensor


def agents(sources: Sequence[str], count: int) -> None:
    """Raises ValueError unless there is an agent for each of ``count`` rollouts."""
    if len(sources) != count:
        raise ValueError(f"sources must name {count} agents, one for each rollout, not {len(sources)}")


def tensor(name: str, values: Tensor | Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    """Numbers of any shape."""
    if isinstance(values, Tensor) and values.is_complex():
        raise ValueError(f"{name} must hold real numbers, not complex ones")
    try:
        return torch.as_tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must hold numbers: {error}") from None


def flags(name: str, values: Tensor, wanted: tuple[int, ...], device: torch.device) -> Tensor:
    """True and false, or 1 and 0, as bool."""
    values = tensor(name, values)
    shape(name, values, wanted)
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise ValueError(f"{name} must hold true and false, or 1 and 0")
    return values.to(device, torch.bool)


def shape(name: str, values: Tensor, wanted: tuple[int, ...]) -> None:
    """Raises ValueError unless the tensor has the shape wanted."""
    if values.shape != wanted:
        raise ValueError(f"{name} must have shape {tuple(wanted)}, not {tuple(values.shape)}")


def finite(name: str, values: Tensor) -> None:
    """Raises ValueError unless every value is finite."""
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{name} must be finite")
