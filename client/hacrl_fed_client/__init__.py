"""A site: one agent, its model, its training."""
