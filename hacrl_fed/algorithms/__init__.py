"""The mathematics: pure functions of tensors, no I/O. Only this package needs torch, so import its modules by name."""
