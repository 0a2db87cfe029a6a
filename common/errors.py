"""Every error that Baton raises on purpose.

    BatonError
    +-- RequestError            the client's request is at fault (4xx)
    |   +-- InvalidRequest      400  malformed, out of range, unsupported field
    |   +-- PromptTooLong       400  does not fit the model or the pool
    |   +-- UnknownModel        404
    |   +-- RequestAborted      499  the client left
    +-- ServiceError            the service is at fault (5xx)
    |   +-- Overloaded          429  queue full: try again later
    |   +-- CacheInUse          409  requests read the prefix cache that is to be reset
    |   +-- NoNodeAvailable     503
    |   +-- NodeFailed          502  a node died or answered nonsense
    |   |   +-- EngineStopped   502  the node is up, its engine is not
    |   +-- DeadlineExceeded    504
    +-- TransferError           KV transfer between nodes
    |   +-- TransferFailed      502  D computes the rest itself, or fails the request if it was told to
    |   +-- IncompatiblePeer         fingerprints differ: never retried
    +-- ModelLoadError          a checkpoint is unusable
    +-- ConfigError             a flag, file, variable or Helm value is wrong (exit code 2)
    +-- CapacityError           a pool has no room (the caller decides what waits)
    +-- ProtocolViolation       a peer or a caller broke a state machine

A message says what is wrong, which value, and what to do.
"""

from collections.abc import Mapping, Sequence


class BatonError(Exception):
    """Root of the tree. ``http_status`` is what the router answers; ``retryable`` tells whether
    the same request may succeed on another node or later."""

    http_status: int = 500
    error_type: str = "internal_error"
    retryable: bool = False

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class RequestError(BatonError):
    http_status = 400
    error_type = "invalid_request_error"


class InvalidRequest(RequestError):
    """A field is malformed, out of range or not supported; ``param`` names it."""


class PromptTooLong(RequestError):
    """The prompt (plus what it must generate) fits neither the model nor the pool."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="prompt", code="context_length_exceeded")


class UnknownModel(RequestError):
    http_status = 404

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class RequestAborted(RequestError):
    http_status = 499


class ServiceError(BatonError):
    http_status = 503
    error_type = "server_error"
    retryable = True


class Overloaded(ServiceError):
    http_status = 429
    error_type = "rate_limit_error"


class CacheInUse(ServiceError):
    http_status = 409


class NoNodeAvailable(ServiceError):
    http_status = 503


class NodeFailed(ServiceError):
    http_status = 502


class EngineStopped(NodeFailed):
    """A call came after the engine's loop had ended: it was not carried out."""


class DeadlineExceeded(ServiceError):
    http_status = 504
    error_type = "timeout_error"


class TransferError(BatonError):
    """Clients see it only from decode nodes that run with ``--on-transfer-failure fail``."""

    http_status = 502
    error_type = "transfer_error"


class TransferFailed(TransferError):
    """A KV transfer ended without its commit.

    ``final_upto``: positions below it arrived, were verified and may be kept.
    ``quarantined``: destination blocks by KV group that something may still write to; they stay
    with the receiver and must not be freed by the caller.
    """

    retryable = True

    def __init__(
        self,
        reason: str,
        *,
        final_upto: int = 0,
        quarantined: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final_upto = final_upto
        self.quarantined: dict[int, tuple[int, ...]] = {g: tuple(b) for g, b in (quarantined or {}).items()}


class IncompatiblePeer(TransferError):
    """Two nodes whose fingerprints differ; the message names the differing fields."""


class ModelLoadError(BatonError):
    error_type = "model_error"


class ConfigError(BatonError):
    error_type = "config_error"


class CapacityError(BatonError):
    http_status = 503
    retryable = True


class ProtocolViolation(BatonError):
    error_type = "protocol_error"
