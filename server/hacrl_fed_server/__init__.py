"""The coordinator: one process, one port."""

import hacrl_fed  # noqa: F401  # before Flower, whose telemetry it turns off
