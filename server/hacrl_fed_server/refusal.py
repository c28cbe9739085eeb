"""How the coordinator says no."""

import grpc


class CallRefusedError(Exception):
    """A request that is refused: a gRPC status code and one sentence for the caller."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
