"""A site: one agent, its model, its training."""

import hacrl_fed  # noqa: F401  # before Flower, whose telemetry it turns off
