"""The exchange: what a coordinator takes, over a real socket; what it refuses and how; and how it closes steps."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from federation import AGENT_KEYS, RUN, STRANGER, TASK, Author, Coordinator, rollout, run_config, serving
from hacrl_fed.protocol import digests, envelope
from hacrl_fed.protocol.keys import key_id
from hacrl_fed.records import Participation, Rollout
from hacrl_fed.v1 import envelope_pb2, exchange_pb2, exchange_pb2_grpc, rollout_pb2
from hacrl_fed_server.refusal import CallRefusedError

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
LIMITS = {"chunk_bytes": 1024, "text_bytes": 64, "rollouts_per_step": 6, "chunks_per_step": 4, "chunks_in_flight": 2}
PROMPTS = TASK.train
OTHER = digests.sha256_hex(b"other")


def two_agents(folder: Path) -> tuple[Coordinator, Author, Author]:
    """A coordinator with alpha and beta there, and what writes their chunks."""
    coordinator = Coordinator(
        folder, run_config(limits=LIMITS, prompts_per_step=8, deadlines={"join_s": 1e-6}), "alpha", "beta", "gamma"
    )
    return coordinator, coordinator.join("alpha"), coordinator.join("beta")


def pair(text: str = "ok") -> list[Rollout]:
    """A group of two rollouts."""
    return [rollout(PROMPTS[0], index, text) for index in range(2)]


def listed(coordinator: Coordinator) -> list[bytes]:
    """All messages of the log."""
    return [event.message for event in coordinator.ledger.events(0, 0, 1000)]


# --- what is taken


def test_a_chain_of_chunks_is_taken_and_stored_as_it_was_sent(tmp_path: Path) -> None:
    coordinator, alpha, _ = two_agents(tmp_path)
    first = alpha.chunk(0, coordinator.genesis, pair())
    last = alpha.chunk(0, coordinator.genesis, pair(), final=True)
    assert coordinator.exchange.publish("alpha", first)
    assert coordinator.exchange.standing("alpha") == (0, False)
    assert coordinator.exchange.publish("alpha", last)
    assert coordinator.exchange.standing("alpha") == (0, True)
    assert coordinator.exchange.standing("beta") == (0, False)
    stored = [exchange_pb2.Chunk.FromString(message) for message in listed(coordinator)]
    assert [(chunk.header.payload, chunk.header.signature, chunk.body) for chunk in stored] == [
        (chunk.header.payload, chunk.header.signature, chunk.body) for chunk in (first, last)
    ]


def test_a_chunk_that_is_there_already_is_a_duplicate_even_of_a_closed_step(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    chunk = alpha.chunk(0, coordinator.genesis, pair(), final=True)
    assert coordinator.exchange.publish("alpha", chunk)
    assert not coordinator.exchange.publish("alpha", chunk)
    coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))
    coordinator.advance()
    assert coordinator.exchange.open_step == 1
    assert not coordinator.exchange.publish("alpha", chunk)
    assert len(listed(coordinator)) == 3


def test_the_wire_tells_a_new_chunk_from_a_duplicate(tmp_path: Path) -> None:
    coordinator, alpha, _ = two_agents(tmp_path)
    chunk = alpha.chunk(0, coordinator.genesis, pair())
    with serving(coordinator, tmp_path) as served, served.channel("alpha", 1) as channel:
        stub = exchange_pb2_grpc.ExchangeStub(channel)
        assert [stub.Publish(chunk, timeout=10).duplicate for _ in range(2)] == [False, True]


# --- what is refused

Making = Callable[[Coordinator, Author], exchange_pb2.Chunk]


def changed(**changes: Any) -> Making:
    """A first chunk whose header says something else."""
    return lambda coordinator, author: author.chunk(0, coordinator.genesis, pair(), **changes)


def following(manifest: str) -> Making:
    return lambda _, author: author.chunk(0, manifest, pair())


def early(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    return author.chunk(1, coordinator.genesis, pair())


def with_body(body: bytes) -> Making:
    return lambda coordinator, author: author.chunk(0, coordinator.genesis, body=body, rollout_count=1)


def forged(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    """Names the agent's key, and is signed by another."""
    chunk = author.chunk(0, coordinator.genesis, pair(), key=STRANGER)
    chunk.header.key_id = key_id(AGENT_KEYS["alpha"].public_key())
    return chunk


def for_another_purpose(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    chunk = author.chunk(0, coordinator.genesis, pair())
    signed = envelope.sign(AGENT_KEYS["alpha"], envelope.CALL_TOKEN_TYPE, chunk.header.payload)
    return exchange_pb2.Chunk(header=signed, body=chunk.body)


def malformed_header(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    return exchange_pb2.Chunk(header=envelope.sign(AGENT_KEYS["alpha"], envelope.CHUNK_HEADER_TYPE, b"\xff\xff"))


def unknown_finish() -> bytes:
    """A body whose one rollout does not say why it ended."""
    proto = rollout_pb2.Rollout(prompt_id=PROMPTS[0].id, text="x", logp_sum=-1.0, token_count=1)
    return rollout_pb2.ChunkBody(rollouts=[proto]).SerializeToString()


def after_final(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    coordinator.exchange.publish("alpha", author.chunk(0, coordinator.genesis, pair(), final=True))
    return author.chunk(0, coordinator.genesis, pair())


def after_one(**changes: Any) -> Making:
    """A second chunk whose header says something else."""

    def make(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
        coordinator.exchange.publish("alpha", author.chunk(0, coordinator.genesis, pair()))
        return author.chunk(0, coordinator.genesis, pair(), **changes)

    return make


def after_many(count: int, rollouts: int) -> Making:
    def make(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
        for _ in range(count):
            coordinator.exchange.publish("alpha", author.chunk(0, coordinator.genesis, pair()[:rollouts]))
        return author.chunk(0, coordinator.genesis, pair()[:rollouts])

    return make


def of_the_step_before(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    """Another chunk of a step that was closed at its deadline."""
    coordinator.exchange.publish("alpha", author.chunk(0, coordinator.genesis, pair()))
    coordinator.advance()
    coordinator.advance(after_s=1e6)
    assert coordinator.exchange.open_step == 1
    return author.chunk(0, coordinator.genesis, pair())


def not_after_the_manifest(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    of_the_step_before(coordinator, author)
    return Author("alpha").chunk(
        1, coordinator.genesis, pair(), previous_chunk=coordinator.ledger.chain_head("alpha", 1)
    )


def beyond_the_last_step(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    manifest = coordinator.genesis
    for step in range(coordinator.run.steps):
        coordinator.exchange.publish("alpha", author.chunk(step, manifest, final=True))
        coordinator.exchange.publish("beta", coordinator.authors["beta"].chunk(step, manifest, final=True))
        coordinator.advance()
        manifest = coordinator.exchange.manifest_digest(step)
    assert coordinator.exchange.complete
    return author.chunk(coordinator.run.steps, manifest, pair())


def changed_to_nothing(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    return author.chunk(0, coordinator.genesis)


def superseded(coordinator: Coordinator, author: Author) -> exchange_pb2.Chunk:
    coordinator.join("alpha", "second")
    return author.chunk(0, coordinator.genesis, pair())


REFUSALS: dict[str, tuple[Making, grpc.StatusCode, str]] = {
    "wrong signer": (changed(key=STRANGER), INVALID, "the envelope names key"),
    "forged": (forged, INVALID, "the signature is not one of key"),
    "other purpose": (for_another_purpose, INVALID, "the envelope holds 'application/vnd.hacrl-fed.call-token"),
    "malformed header": (malformed_header, INVALID, "chunk header: these bytes are not a ChunkHeader"),
    "other agent": (changed(agent="beta"), INVALID, "the chunk is of agent beta, and the call of alpha"),
    "other run": (changed(run_id="other"), INVALID, f"the chunk is of run other, not {RUN}"),
    "version": (changed(protocol_version=2), INVALID, "protocol version 2 is not 1"),
    "digest": (changed(body_sha256=OTHER), INVALID, "the body is not the one that the header's body_sha256 names"),
    "malformed body": (with_body(b"\xff\xff"), INVALID, "chunk body: these bytes are not a ChunkBody"),
    "malformed rollout": (with_body(unknown_finish()), INVALID, "chunk body: rollout 0: finish_reason has no meaning"),
    "count": (changed(rollout_count=3), INVALID, "the body holds 2 rollouts, and rollout_count says 3"),
    "chunk too large": (with_body(bytes(1025)), EXHAUSTED, "a chunk of 1025 bytes is over limits.chunk_bytes = 1024"),
    "text too large": (
        lambda coordinator, author: author.chunk(0, coordinator.genesis, pair("é" * 33)),
        EXHAUSTED,
        "a text of 66 bytes is over limits.text_bytes = 64",
    ),
    "step to come": (early, INVALID, "step 1 is not open yet; step 0 is"),
    "step closed": (of_the_step_before, PRECONDITION, "step 0 is closed; step 1 is open"),
    "beyond the last step": (beyond_the_last_step, PRECONDITION, "all 3 steps of the run are closed"),
    "finished": (after_final, PRECONDITION, "alpha has already finished step 0"),
    "order": (changed(chunk_index=1), INVALID, "chunk 1 is out of order: chunk 0 is next"),
    "order again": (after_one(chunk_index=0), INVALID, "chunk 0 is out of order: chunk 1 is next"),
    "chain": (after_one(previous_chunk=OTHER), INVALID, "previous_chunk does not name this agent's previous chunk"),
    "chain begun anew": (after_one(previous_chunk=""), INVALID, "previous_chunk does not name"),
    "genesis": (following(OTHER), INVALID, "previous_manifest does not name the manifest of step -1"),
    "manifest": (not_after_the_manifest, INVALID, "previous_manifest does not name the manifest of step 0"),
    "superseded": (superseded, grpc.StatusCode.ABORTED, "incarnation 1 of alpha has been superseded"),
    "incarnation to come": (changed(incarnation=2), grpc.StatusCode.ABORTED, "incarnation 2 of alpha"),
    "chunks": (after_many(4, 1), EXHAUSTED, "more than 4 chunks in a step (limits.chunks_per_step"),
    "rollouts": (after_many(3, 2), EXHAUSTED, "8 rollouts in a step are over 6 (limits.rollouts_per_step"),
    "nothing": (changed_to_nothing, INVALID, "a chunk without rollouts can only be a step's last one"),
    "total": (
        after_one(final=True, total_rollouts=3),
        INVALID,
        "total_rollouts says 3, and the chunks hold 4",
    ),
}


@pytest.mark.parametrize(("make", "code", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_a_faulty_chunk_is_refused_by_name_and_not_stored(
    tmp_path: Path, make: Making, code: grpc.StatusCode, sentence: str
) -> None:
    coordinator, alpha, _ = two_agents(tmp_path)
    chunk = make(coordinator, alpha)
    before, standing = listed(coordinator), coordinator.exchange.standing("alpha")
    with (
        serving(coordinator, tmp_path) as served,
        served.channel("alpha", 1) as channel,
        pytest.raises(grpc.RpcError) as refusal,
    ):
        exchange_pb2_grpc.ExchangeStub(channel).Publish(chunk, timeout=10)
    assert refusal.value.code() is code
    assert sentence in str(refusal.value.details())
    assert listed(coordinator) == before
    assert coordinator.exchange.standing("alpha") == standing


class Reentrant:
    """A chunk that publishes another while it is being checked: one more in flight, without a race."""

    def __init__(self, coordinator: Coordinator, agent: str, inner: Any) -> None:
        self._publish: Callable[[], bool] = lambda: coordinator.exchange.publish(agent, inner)
        self.header = envelope_pb2.Envelope()

    @property
    def body(self) -> bytes:
        self._publish()
        return b""


def test_more_chunks_in_flight_than_allowed_are_refused(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    chunk = alpha.chunk(0, coordinator.genesis, pair())
    over: Any = Reentrant(coordinator, "alpha", Reentrant(coordinator, "alpha", chunk))
    with pytest.raises(CallRefusedError, match=r"more than limits\.chunks_in_flight = 2 chunks at once") as refusal:
        coordinator.exchange.publish("alpha", over)
    assert refusal.value.code is EXHAUSTED
    assert listed(coordinator) == []
    # Each agent has its own share, and a refused chunk is in flight no more.
    other: Any = Reentrant(coordinator, "beta", Reentrant(coordinator, "beta", chunk))
    with pytest.raises(CallRefusedError, match="chunks_in_flight"):
        coordinator.exchange.publish("beta", other)
    assert coordinator.exchange.publish("alpha", chunk)
    assert coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, pair()))


def test_no_agent_may_publish_more_than_the_step_asks_for(tmp_path: Path) -> None:
    run = run_config(prompts_per_step=2, group_size=2, deadlines={"join_s": 1e-6})
    coordinator = Coordinator(tmp_path, run, "alpha", "beta")
    alpha, beta = coordinator.join("alpha"), coordinator.join("beta")
    for _ in range(2):
        coordinator.exchange.publish("alpha", alpha.chunk(0, coordinator.genesis, pair()))
    with pytest.raises(CallRefusedError, match=r"5 rollouts in a step are over 4 \(.*prompts_per_step x group_size\)"):
        coordinator.exchange.publish("alpha", alpha.chunk(0, coordinator.genesis, pair()[:1]))
    for _ in range(3):
        coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, pair()[:1]))
    with pytest.raises(CallRefusedError, match=r"more than 3 chunks in a step .*one a prompt"):
        coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))


# --- how steps are closed


def test_a_manifest_says_who_is_complete_partial_or_absent(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    chunks = [alpha.chunk(0, coordinator.genesis, pair()), alpha.chunk(0, coordinator.genesis, pair(), final=True)]
    for chunk in chunks:
        coordinator.exchange.publish("alpha", chunk)
    part = beta.chunk(0, coordinator.genesis, pair())
    coordinator.exchange.publish("beta", part)
    coordinator.advance()
    assert coordinator.manifests() == []  # beta is awaited
    coordinator.advance(after_s=1e6)
    [manifest] = coordinator.manifests()
    assert (manifest.run_id, manifest.step, manifest.previous_manifest) == (RUN, 0, coordinator.genesis)
    assert [entry.agent for entry in manifest.entries] == ["alpha", "beta", "gamma"]
    whole, partial, absent = manifest.entries
    assert (whole.participation, whole.incarnation, whole.rollout_count) == (Participation.COMPLETE, 1, 4)
    assert whole.chunks == tuple(digests.payload_digest(chunk.header) for chunk in chunks)
    assert (partial.participation, partial.rollout_count) == (Participation.PARTIAL, 2)
    assert partial.chunks == (digests.payload_digest(part.header),)
    assert (absent.participation, absent.rollout_count, absent.chunks) == (Participation.ABSENT, 0, ())


def test_of_an_agent_that_restarted_the_newest_process_counts(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    coordinator.exchange.publish("alpha", alpha.chunk(0, coordinator.genesis, pair()))
    again = coordinator.join("alpha", "second")
    counted = again.chunk(0, coordinator.genesis, pair()[:1], final=True)
    coordinator.exchange.publish("alpha", counted)
    coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))
    coordinator.advance()
    [manifest] = coordinator.manifests()
    entry = manifest.by_agent["alpha"]
    assert (entry.incarnation, entry.rollout_count) == (2, 1)
    assert entry.chunks == (digests.payload_digest(counted.header),)


def test_of_an_agent_that_restarted_without_publishing_the_earlier_process_counts(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    coordinator.exchange.publish("alpha", alpha.chunk(0, coordinator.genesis, pair()))
    coordinator.join("alpha", "second")
    coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))
    coordinator.advance()
    coordinator.advance(after_s=1e6)
    entry = coordinator.manifests()[0].by_agent["alpha"]
    assert (entry.participation, entry.incarnation, entry.rollout_count) == (Participation.PARTIAL, 1, 2)


def test_what_an_earlier_process_finished_counts_after_a_restart(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    coordinator.exchange.publish("alpha", alpha.chunk(0, coordinator.genesis, pair(), final=True))
    again = coordinator.join("alpha", "second")
    assert coordinator.exchange.standing("alpha") == (0, True)
    with pytest.raises(CallRefusedError, match="already finished"):
        coordinator.exchange.publish("alpha", again.chunk(0, coordinator.genesis, pair()))
    coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))
    coordinator.advance()
    entry = coordinator.manifests()[0].by_agent["alpha"]
    assert (entry.participation, entry.incarnation) == (Participation.COMPLETE, 1)


def test_manifests_form_a_chain_from_the_genesis_to_the_last_step_also_over_a_restart(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    previous = coordinator.genesis
    for step in range(3):
        if step == 2:  # the coordinator is killed, and the sites come back to another
            coordinator = Coordinator(tmp_path, coordinator.run, "alpha", "beta", "gamma")
            coordinator.barrier.arrived("beta")
            assert coordinator.exchange.open_step == 2
        coordinator.exchange.publish("alpha", alpha.chunk(step, previous, pair(), final=True))
        if step == 1:  # and here in the middle of a step, which alpha has finished
            coordinator = Coordinator(tmp_path, coordinator.run, "alpha", "beta", "gamma")
            coordinator.barrier.arrived("beta")
            assert coordinator.exchange.standing("alpha") == (1, True)
        coordinator.exchange.publish("beta", beta.chunk(step, previous, pair(), final=True))
        coordinator.advance()
        coordinator.advance(after_s=coordinator.run.deadlines.rejoin_s)  # gamma never came
        previous = coordinator.exchange.manifest_digest(step)
    manifests = coordinator.manifests()
    assert [manifest.step for manifest in manifests] == [0, 1, 2]
    chain = [coordinator.genesis, *(coordinator.exchange.manifest_digest(step) for step in range(2))]
    assert [manifest.previous_manifest for manifest in manifests] == chain
    assert {entry.participation for manifest in manifests for entry in manifest.entries[:2]} == {Participation.COMPLETE}
    assert coordinator.exchange.complete
    coordinator.advance(after_s=1e6)
    assert len(coordinator.manifests()) == 3


# --- what is handed on


def test_events_are_those_of_others_from_a_step_on_and_new_ones_as_they_come(tmp_path: Path) -> None:
    coordinator, alpha, beta = two_agents(tmp_path)
    coordinator.exchange.publish("alpha", alpha.chunk(0, coordinator.genesis, pair(), final=True))
    coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))
    coordinator.advance()
    manifest = coordinator.exchange.manifest_digest(0)
    with serving(coordinator, tmp_path) as served, served.channel("alpha", 1) as channel:
        stub = exchange_pb2_grpc.ExchangeStub(channel)
        events = stub.Subscribe(exchange_pb2.SubscribeRequest(first_step=0), timeout=20)
        others, closed = next(events), next(events)
        assert others.chunk.header.key_id == key_id(AGENT_KEYS["beta"].public_key())
        assert digests.payload_digest(closed.manifest) == manifest
        coming = beta.chunk(1, manifest, pair())
        publishing = threading.Thread(target=coordinator.exchange.publish, args=("beta", coming))
        publishing.start()
        assert next(events).chunk.body == coming.body
        publishing.join()
        # An agent's newest subscription takes the place of the one before.
        later = stub.Subscribe(exchange_pb2.SubscribeRequest(first_step=1), timeout=20)
        assert next(later).chunk.body == coming.body
        assert list(events) == []
        later.cancel()


def test_a_process_is_given_what_an_earlier_one_of_its_agent_published(tmp_path: Path) -> None:
    coordinator, alpha, _ = two_agents(tmp_path)
    old = alpha.chunk(0, coordinator.genesis, pair())
    coordinator.exchange.publish("alpha", old)
    again = coordinator.join("alpha", "second")
    coordinator.exchange.publish("alpha", again.chunk(0, coordinator.genesis, pair()[:1], final=True))
    lives = iter([True, False])
    events = list(coordinator.exchange.events("alpha", 2, 0, lambda: next(lives)))
    assert [event.chunk.body for event in events] == [old.body]


def test_of_closed_steps_that_an_agent_had_no_part_in_it_is_given_the_manifests_alone(tmp_path: Path) -> None:
    coordinator, alpha, _ = two_agents(tmp_path)
    previous = coordinator.genesis
    coordinator.exchange.publish("alpha", alpha.chunk(0, previous, pair(), final=True))
    coordinator.advance()
    coordinator.advance(after_s=1e6)
    coordinator.exchange.publish("alpha", alpha.chunk(1, coordinator.exchange.manifest_digest(0), pair()))

    def events_of(agent: str, incarnation: int, count: int) -> list[str | None]:
        lives = iter([True] * count + [False])
        events = coordinator.exchange.events(agent, incarnation, 0, lambda: next(lives))
        return [event.WhichOneof("event") for event in events]

    assert events_of("beta", 1, 1) == ["manifest", "chunk"]
    # An agent that did have a part learns from the step again.
    assert events_of("alpha", 2, 1) == ["chunk", "manifest", "chunk"]
