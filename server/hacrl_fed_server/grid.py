"""Flower's Grid over the coordinator's sessions."""

import time
from collections.abc import Callable, Iterable

from flwr.app import DEFAULT_TTL, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from hacrl_fed.protocol import flower
from hacrl_fed.protocol.roster import Roster
from hacrl_fed_server.sessions import Sessions

_POLL_S = 0.1


class CoordinatorGrid(Grid):
    """A Grid whose nodes are the roster's agents with a live session.

    An agent that goes away answers what it was ordered with an error, and can be ordered again when it is back.
    """

    def __init__(self, roster: Roster, sessions: Sessions, check: Callable[[], None]) -> None:
        """``check`` raises what has gone wrong in the coordinator meanwhile, and is called whenever nodes are asked for."""
        self._sessions = sessions
        self._check = check
        self._run = Run.create_empty(flower.run_id(roster.run))
        self._agents = {flower.node_id(name): name for name in roster.names}
        self._pushed: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        """Sets the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message from the coordinator to an agent's node."""
        return flower.make_message(
            config=dict(content.config_records[flower.CONFIG]),  # type: ignore[arg-type]  # the adapter refuses others
            metrics={},
            message_type=message_type,
            dst_node_id=dst_node_id,
            group_id=group_id,
            ttl=DEFAULT_TTL if ttl is None else ttl,
            run_id=self._run.run_id,
            message_id="",  # given when the message is pushed
        )

    def get_node_ids(self) -> Iterable[int]:
        """Nodes of the agents that are present or expected back at once."""
        self._check()
        return [flower.node_id(name) for name in self._sessions.reachable()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queues messages for their agents. Raises KeyError for a node that is not in the roster."""
        message_ids = []
        for message in messages:
            agent = self._agents[message.metadata.dst_node_id]
            message_id = self._sessions.push(agent, flower.to_proto(message))
            self._pushed[message_id] = message
            message_ids.append(message_id)
        return message_ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have come to these messages; each is given out once."""
        replies = []
        for reply in self._sessions.take_replies(message_ids):
            order = self._pushed.pop(reply.reply_to_message_id)
            replies.append(
                flower.from_proto(
                    reply,
                    run_id=self._run.run_id,
                    src_node_id=order.metadata.dst_node_id,
                    dst_node_id=order.metadata.src_node_id,
                )
            )
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Pushes messages and waits for their replies, ``timeout`` seconds at most; those that have come by then."""
        waiting = set(self.push_messages(messages))
        deadline = time.monotonic() + timeout if timeout is not None else None
        replies: list[Message] = []
        while waiting and (deadline is None or time.monotonic() < deadline):
            for reply in self.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
            time.sleep(_POLL_S)
        return replies
