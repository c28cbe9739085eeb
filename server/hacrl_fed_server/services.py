"""The gRPC services: each method unpacks its request, calls the sessions or the exchange, and turns a refusal into a status.

They are not the generated servicers' subclasses: each method is also given the call's verified token (transport.make_server).
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from hacrl_fed import PROTOCOL_VERSION
from hacrl_fed.protocol import flower
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import CallToken, check_digest, check_name
from hacrl_fed.v1 import envelope_pb2, exchange_pb2, session_pb2
from hacrl_fed_server.exchange import Exchange
from hacrl_fed_server.refusal import CallRefusedError
from hacrl_fed_server.sessions import Sessions

_MAX_METRICS = 4096
_MAX_METRIC_NAME = 160


class SessionService:
    """Joining, orders and replies, liveness, metrics."""

    def __init__(
        self, roster: Roster, run_config: envelope_pb2.Envelope, sessions: Sessions, exchange: Exchange
    ) -> None:
        self._roster = roster
        self._run_config = run_config
        self._sessions = sessions
        self._exchange = exchange

    def GetRun(  # noqa: N802
        self, request: session_pb2.GetRunRequest, context: grpc.ServicerContext, token: CallToken
    ) -> session_pb2.GetRunResponse:
        """Gives the run's signed configuration to a site with the same protocol and roster."""
        with _refusing(context):
            if request.protocol_version != PROTOCOL_VERSION:
                raise CallRefusedError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"this site speaks protocol version {request.protocol_version}, and the server {PROTOCOL_VERSION}: "
                    "install the same hacrl-fed on both sides",
                )
            if request.roster_digest != self._roster.digest:
                raise CallRefusedError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"this site's roster (digest {request.roster_digest[:12]}) differs from the server's "
                    f"(digest {self._roster.digest[:12]}): both sides need the same roster file",
                )
        return session_pb2.GetRunResponse(run_config=self._run_config)

    def Join(  # noqa: N802
        self, request: session_pb2.JoinRequest, context: grpc.ServicerContext, token: CallToken
    ) -> session_pb2.JoinResponse:
        """Admits a process as the agent's newest."""
        with _refusing(context):
            check_digest("task_digest", request.task_digest)
            check_name("instance_id", request.instance_id)
            incarnation = self._sessions.join(token.agent, request.task_digest, request.instance_id)
            open_step, finished = self._exchange.standing(token.agent)
        return session_pb2.JoinResponse(incarnation=incarnation, open_step=open_step, open_step_finished=finished)

    def Attend(  # noqa: N802
        self, request: session_pb2.AttendRequest, context: grpc.ServicerContext, token: CallToken
    ) -> Iterator[session_pb2.SessionEvent]:
        """The session: orders, status and the end of the run, as long as the stream is open."""
        with _refusing(context):
            _wake_when_gone(context, self._exchange.changed)
            yield from self._sessions.attend(token.agent, token.incarnation, context.is_active)

    def Reply(  # noqa: N802
        self, request: session_pb2.FlowerMessage, context: grpc.ServicerContext, token: CallToken
    ) -> session_pb2.ReplyResponse:
        """Takes the reply to an order, if it is one that Flower can be given."""
        with _refusing(context):
            ids = {"src_node_id": flower.node_id(token.agent), "dst_node_id": flower.SERVER_NODE_ID}
            flower.from_proto(request, run_id=flower.run_id(self._roster.run), **ids)
            self._sessions.reply(token.agent, token.incarnation, request)
        return session_pb2.ReplyResponse()

    def Heartbeat(  # noqa: N802
        self, request: session_pb2.HeartbeatRequest, context: grpc.ServicerContext, token: CallToken
    ) -> session_pb2.HeartbeatResponse:
        """A sign of life."""
        with _refusing(context):
            self._sessions.heartbeat(token.agent, token.incarnation, request.step, request.phase)
        return session_pb2.HeartbeatResponse()

    def Report(  # noqa: N802
        self, request: session_pb2.StepReport, context: grpc.ServicerContext, token: CallToken
    ) -> session_pb2.StepReportResponse:
        """Takes an agent's metrics of a step."""
        with _refusing(context):
            if len(request.metrics) > _MAX_METRICS:
                raise CallRefusedError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"a report holds at most {_MAX_METRICS} metrics"
                )
            for name, value in request.metrics.items():
                if len(name) > _MAX_METRIC_NAME:
                    raise ValueError(f"a metric's name has at most {_MAX_METRIC_NAME} characters")
                if not math.isfinite(value):
                    raise ValueError(f"metric {name!r} must be finite, not {value}")
            self._sessions.report(token.agent, token.incarnation, request.step, dict(request.metrics))
        return session_pb2.StepReportResponse()


class ExchangeService:
    """Publishing and receiving rollouts."""

    def __init__(self, sessions: Sessions, exchange: Exchange) -> None:
        self._sessions = sessions
        self._exchange = exchange

    def Publish(  # noqa: N802
        self, request: exchange_pb2.Chunk, context: grpc.ServicerContext, token: CallToken
    ) -> exchange_pb2.PublishResponse:
        """Takes a chunk."""
        with _refusing(context):
            new = self._exchange.publish(token.agent, request)
        return exchange_pb2.PublishResponse(duplicate=not new)

    def Subscribe(  # noqa: N802
        self, request: exchange_pb2.SubscribeRequest, context: grpc.ServicerContext, token: CallToken
    ) -> Iterator[exchange_pb2.ExchangeEvent]:
        """The log from a step on."""
        _wake_when_gone(context, self._exchange.changed)
        with _refusing(context):
            self._sessions.check_incarnation(token.agent, token.incarnation)
        yield from self._exchange.events(token.agent, token.incarnation, request.first_step, context.is_active)


@contextmanager
def _refusing(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except CallRefusedError as refusal:
        context.abort(refusal.code, refusal.message)
    except ValueError as error:  # what a record or a conversion says of a bad value
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _wake_when_gone(context: grpc.ServicerContext, changed: threading.Condition) -> None:
    """Lets a waiting stream see at once that its client has gone."""

    def wake() -> None:
        with changed:
            changed.notify_all()

    context.add_callback(wake)
