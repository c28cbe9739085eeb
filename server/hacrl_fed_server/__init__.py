"""The coordinator: one process, one port."""
