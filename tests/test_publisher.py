"""The publisher: whole groups in signed chunks over a real server, whose exchange is the judge of the chain."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from federation import AGENT_KEYS, RUN, TASK, TOKENIZER_DIGEST, Coordinator, eventually, rollout, run_config, serving
from hacrl_fed.config import WireLimits
from hacrl_fed.errors import HacrlFedError, RefusedError
from hacrl_fed.protocol import convert, digests
from hacrl_fed.records import ChunkHeader, SamplingParameters
from hacrl_fed.v1 import exchange_pb2
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.admission import Admission, AdmittedRollout, StepExpectation
from hacrl_fed_client.inbox import Inbox
from hacrl_fed_client.publisher import OwnStep, Publisher
from hacrl_fed_client.retokenize import Retokenizer
from hacrl_fed_client.session import Session
from tiny_models import tiny_tokenizer

FIRST, SECOND = TASK.train[:2]
TOKENIZER = tiny_tokenizer()


@dataclass(frozen=True, slots=True)
class Publishing:
    coordinator: Coordinator
    session: Session
    inbox: Inbox
    publisher: Publisher

    def own_step(self, step: int) -> OwnStep:
        return OwnStep(step, self.coordinator.exchange.manifest_digest(step - 1), policy_step=3)

    def published(self, step: int) -> list[tuple[ChunkHeader, list[str]]]:
        """Alpha's chunks in the log: header and texts."""
        events = [event for event in self.coordinator.ledger.events(step, 0, 100) if event.agent == "alpha"]
        chunks = [exchange_pb2.Chunk.FromString(event.message) for event in events]
        return [
            (convert.header_from_payload(c.header.payload), [r.text for r in convert.rollouts_from_body(c.body)])
            for c in chunks
        ]


@contextlib.contextmanager
def publishing(folder: Path, chunk_bytes: int = 1 << 20, egress_bytes: int = 1 << 20) -> Iterator[Publishing]:
    limits = {"chunk_bytes": chunk_bytes}
    coordinator = Coordinator(
        folder, run_config(limits=limits, prompts_per_step=8, deadlines={"join_s": 1e-6}), "alpha", "beta"
    )
    with serving(coordinator, folder) as served, served.session("alpha", folder / "site", egress_bytes) as session:
        session.join(TASK.digest, 0)
        coordinator.barrier.arrived("alpha")
        admission = Admission(
            "alpha",
            coordinator.roster,
            WireLimits(),
            2,
            16,
            VerifierPool(TASK.verifier, 1.0, 1),
            Retokenizer(TOKENIZER, (TOKENIZER.eos_token_id,)),
            TOKENIZER_DIGEST,
        )
        inbox = Inbox(
            coordinator.roster,
            admission,
            lambda step, previous: StepExpectation(step, previous, {FIRST.id: FIRST, SECOND.id: SECOND}),
            0,
            coordinator.genesis,
        )
        sampling = SamplingParameters(16)
        key = AGENT_KEYS["alpha"]
        publisher = Publisher(session, inbox, key, RUN, "alpha", sampling, TOKENIZER_DIGEST, chunk_bytes)
        yield Publishing(coordinator, session, inbox, publisher)


def group(*texts: str) -> Sequence[AdmittedRollout]:
    return [AdmittedRollout("alpha", rollout(FIRST, index, text), (1, 2)) for index, text in enumerate(texts)]


def test_groups_are_published_as_a_chain_of_chunks(tmp_path: Path) -> None:
    with publishing(tmp_path) as site:
        site.publisher.publish(site.own_step(0), [group("a", "b"), group("c", "d")], final=False)
        site.publisher.publish(site.own_step(0), [group("e", "f")], final=True)
        eventually(lambda: site.coordinator.exchange.standing("alpha") == (0, True))
        (first, texts), (last, more) = site.published(0)
        assert (texts, more) == (["a", "b", "c", "d"], ["e", "f"])
        assert (first.chunk_index, first.final, first.rollout_count, first.total_rollouts) == (0, False, 4, 0)
        assert (last.chunk_index, last.final, last.rollout_count, last.total_rollouts) == (1, True, 2, 6)
        assert last.previous_chunk == digests.sha256_hex(convert.header_to_payload(first))
        assert (first.policy_step, first.tokenizer_digest, first.incarnation) == (3, TOKENIZER_DIGEST, 1)
        site.session.check()


def test_a_step_of_empty_groups_is_finished_all_the_same(tmp_path: Path) -> None:
    with publishing(tmp_path) as site:
        site.publisher.publish(site.own_step(0), [[], []], final=True)
        eventually(lambda: site.coordinator.exchange.standing("alpha") == (0, True))
        assert [texts for _, texts in site.published(0)] == [[]]


def test_what_is_too_heavy_for_one_chunk_goes_in_several_of_whole_groups(tmp_path: Path) -> None:
    groups = [group(*([letter * 400] * 2)) for letter in "abcde"]
    weight = len(convert.rollouts_to_body([one.rollout for one in groups[0]]))
    with publishing(tmp_path, chunk_bytes=2 * weight) as site:
        site.publisher.publish(site.own_step(0), groups, final=True)
        eventually(lambda: site.coordinator.exchange.standing("alpha") == (0, True))
        chunks = site.published(0)
        assert [[text[0] for text in texts] for _, texts in chunks] == [list("aabb"), list("ccdd"), list("ee")]
        assert [header.final for header, _ in chunks] == [False, False, True]
        assert chunks[-1][0].total_rollouts == 10


def test_a_group_that_fits_in_no_chunk_is_refused_by_name(tmp_path: Path) -> None:
    with publishing(tmp_path, chunk_bytes=1024) as site:
        site.publisher.publish(site.own_step(0), [group("x" * 600, "y" * 600)], final=True)
        with pytest.raises(RefusedError, match=r"a chunk of \d+ bytes is over limits\.chunk_bytes = 1024"):
            list(site.session.orders())


def test_the_chain_goes_on_from_what_was_taken_after_a_step_was_closed_too_early(tmp_path: Path) -> None:
    with publishing(tmp_path) as site:
        coordinator = site.coordinator
        beta = coordinator.join("beta")
        site.publisher.publish(site.own_step(0), [group("a", "b")], final=False)
        coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))
        eventually(lambda: len(site.published(0)) == 1)
        coordinator.advance()
        coordinator.advance(after_s=1e6)
        assert coordinator.exchange.open_step == 1
        # Two more of the closed step, which are dropped, and then the next step's.
        late = OwnStep(0, coordinator.genesis, 3)
        site.publisher.publish(late, [group("c", "d")], final=False)
        site.publisher.publish(late, [group("e", "f")], final=True)
        site.publisher.publish(site.own_step(1), [group("g", "h")], final=True)
        eventually(lambda: coordinator.exchange.standing("alpha") == (1, True))
        (taken, _), (next_one, texts) = site.published(0)
        assert texts == ["g", "h"]
        assert next_one.previous_chunk == digests.sha256_hex(convert.header_to_payload(taken))
        assert (next_one.chunk_index, next_one.total_rollouts) == (0, 2)
        site.session.check()


def test_own_chunks_are_in_the_inbox_when_their_manifest_comes(tmp_path: Path) -> None:
    with publishing(tmp_path) as site:
        coordinator = site.coordinator
        beta = coordinator.join("beta")
        site.session.run_beside(lambda: site.inbox.read(site.session.subscribe(lambda: site.inbox.reading_step)))
        site.publisher.publish(site.own_step(0), [group("a", "b")], final=True)
        coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, [rollout(SECOND)], final=True))
        eventually(lambda: coordinator.exchange.standing("alpha") == (0, True))
        coordinator.advance()
        rollouts, missing = site.inbox.wait_closed(0, 20.0, site.session.check).rollouts()
        assert [one.source for one in rollouts] == ["alpha", "alpha", "beta"]
        assert missing == 0


def test_a_refusal_ends_the_session_by_name(tmp_path: Path) -> None:
    with publishing(tmp_path) as site:
        site.publisher.publish(OwnStep(0, TOKENIZER_DIGEST, 0), [group("a", "b")], final=True)
        with pytest.raises(RefusedError, match="the server refused: previous_manifest does not name"):
            list(site.session.orders())
        assert site.published(0) == []


def test_what_exceeds_the_egress_limit_does_not_leave(tmp_path: Path) -> None:
    with publishing(tmp_path, egress_bytes=1024) as site:
        site.publisher.publish(site.own_step(0), [group("x" * 600, "y" * 600)], final=True)
        with pytest.raises(HacrlFedError, match=r"limits\.egress_bytes_per_step = 1024"):
            list(site.session.orders())
        assert site.published(0) == []
