"""hacrl-fed: organisations train their own language models by reinforcement learning together, without sharing weights."""

import os

# Flower looks up telemetry and update hosts unless both are set before its import; a user's own choice stands.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
# The model hub's library logs each try of a hub that cannot be reached; the error after them says it once.
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
# gRPC's core prints its own lines on stderr, beside the one sentence that says what is wrong.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

__version__ = "0.1.0"
PROTOCOL_VERSION = 1
