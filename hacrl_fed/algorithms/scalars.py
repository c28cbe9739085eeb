"""A check of single numbers, without torch."""

import math


def check_number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises ValueError, which names the argument, unless the value is a finite number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    if not low <= value <= high:
        bounds = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
        raise ValueError(f"{name} must be {bounds}, not {value}")


def check_positive(name: str, value: object) -> None:
    """Raises ValueError, which names the argument, unless the value is a finite number above 0."""
    check_number(name, value)
    if value <= 0:  # type: ignore[operator]
        raise ValueError(f"{name} must be positive, not {value}")
