"""The inbox: a log that holds together is taken in, step by step; one that does not ends the run by name."""

from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation import COORDINATOR, RUN, STRANGER, TASK, Author, rollout, roster_of
from hacrl_fed.config import WireLimits
from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import convert, digests, envelope
from hacrl_fed.records import Manifest, ManifestEntry, Participation
from hacrl_fed.v1 import exchange_pb2
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.admission import Admission, AdmittedChunk, AdmittedRollout, StepExpectation
from hacrl_fed_client.inbox import Inbox
from hacrl_fed_client.retokenize import Retokenizer
from tiny_models import tiny_tokenizer

GENESIS, OTHER = digests.sha256_hex(b"genesis"), digests.sha256_hex(b"other")
ROSTER = roster_of("alpha", "beta")
PROMPTS = {prompt.id: prompt for prompt in TASK.train[:2]}
FIRST, SECOND = TASK.train[:2]
TOKENIZER = tiny_tokenizer()


class Site:
    """Alpha's inbox with its admission."""

    def __init__(self) -> None:
        retokenizer = Retokenizer(TOKENIZER, (TOKENIZER.eos_token_id,))
        verifiers = VerifierPool(TASK.verifier, 1.0, 1)
        self.admission = Admission("alpha", ROSTER, WireLimits(), 2, 16, verifiers, retokenizer, OTHER)
        self.inbox = Inbox(
            ROSTER, self.admission, lambda step, previous: StepExpectation(step, previous, PROMPTS), 0, GENESIS
        )

    def read(self, *events: exchange_pb2.ExchangeEvent) -> None:
        self.inbox.read(events)


def chunk_event(chunk: exchange_pb2.Chunk) -> exchange_pb2.ExchangeEvent:
    return exchange_pb2.ExchangeEvent(chunk=chunk)


def digest_of(chunk: exchange_pb2.Chunk) -> str:
    return digests.payload_digest(chunk.header)


def manifest(
    *chunks: exchange_pb2.Chunk, key: Ed25519PrivateKey = COORDINATOR, **changes: Any
) -> exchange_pb2.ExchangeEvent:
    """A manifest of beta's chunks."""
    entries = [ManifestEntry("alpha", Participation.ABSENT)]
    if chunks:
        entries.append(ManifestEntry("beta", Participation.COMPLETE, 1, 0, tuple(map(digest_of, chunks))))
    fields: dict[str, Any] = {
        "protocol_version": 1,
        "run_id": RUN,
        "step": 0,
        "previous_manifest": GENESIS,
        "entries": tuple(entries),
        "closed_at_ms": 1,
    }
    payload = convert.manifest_to_payload(Manifest(**(fields | changes)))
    return exchange_pb2.ExchangeEvent(manifest=envelope.sign(key, envelope.MANIFEST_TYPE, payload))


def nothing() -> None:
    pass


def test_a_closed_step_holds_what_its_manifest_lists_and_nothing_else() -> None:
    site, author = Site(), Author("beta")
    listed = author.chunk(0, GENESIS, [rollout(FIRST), rollout(FIRST, 1)])
    unlisted = author.chunk(0, GENESIS, [rollout(SECOND)])
    never_came = author.chunk(0, GENESIS, [rollout(SECOND, 1)])
    closing = manifest(listed, never_came)
    assert not site.inbox.has_closed(0)
    site.read(chunk_event(listed), chunk_event(unlisted), closing)
    assert site.inbox.has_closed(0)
    closed = site.inbox.wait_closed(0, 1.0, nothing)
    assert closed.digest == digests.payload_digest(closing.manifest)
    rollouts, missing = closed.rollouts()
    assert [(one.rollout.prompt_id, one.rollout.sample_index) for one in rollouts] == [(FIRST.id, 0), (FIRST.id, 1)]
    assert missing == 1


def test_steps_follow_each_other_by_the_digest_of_the_one_before() -> None:
    site, author = Site(), Author("beta")
    first = manifest()
    previous = digests.payload_digest(first.manifest)
    chunk = author.chunk(1, previous, [rollout(FIRST)])
    site.read(first)
    assert site.inbox.reading_step == 1
    site.read(chunk_event(chunk), manifest(chunk, step=1, previous_manifest=previous))
    rollouts, missing = site.inbox.wait_closed(1, 1.0, nothing).rollouts()
    assert (len(rollouts), missing) == (1, 0)
    assert site.inbox.has_closed(0)
    site.inbox.forget(0)
    assert not site.inbox.has_closed(0)


def test_own_chunks_need_no_admission() -> None:
    site = Site()
    own = Author("alpha").chunk(0, GENESIS, [rollout(FIRST)])
    header = convert.header_from_payload(own.header.payload)
    site.inbox.add_own(0, AdmittedChunk(header, digest_of(own), (AdmittedRollout("alpha", rollout(FIRST), (1, 2)),)))
    entries = (ManifestEntry("alpha", Participation.COMPLETE, 1, 1, (digest_of(own),)),)
    site.read(manifest(entries=entries))
    rollouts, missing = site.inbox.wait_closed(0, 1.0, nothing).rollouts()
    assert ([one.source for one in rollouts], missing) == (["alpha"], 0)


def test_a_subscription_that_was_taken_up_again_repeats_chunks_silently() -> None:
    site, author = Site(), Author("beta")
    chunks = [author.chunk(0, GENESIS, [rollout(FIRST, index)]) for index in range(2)]
    site.read(*map(chunk_event, chunks))
    site.read(*map(chunk_event, chunks), manifest(*chunks))
    rollouts, missing = site.inbox.wait_closed(0, 1.0, nothing).rollouts()
    assert (len(rollouts), missing) == (2, 0)
    assert not site.admission.refused


def test_a_refused_chunk_is_missing_and_the_run_goes_on() -> None:
    site, author = Site(), Author("beta")
    bad = author.chunk(0, GENESIS, [rollout(FIRST)], key=STRANGER)
    site.read(chunk_event(bad), manifest(bad))
    assert site.inbox.wait_closed(0, 1.0, nothing).rollouts() == ([], 1)
    assert site.admission.refused == {("beta", "signature"): 1}


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (manifest(key=STRANGER), "the coordinator's manifest of step 0 is not valid: the envelope names key"),
        (manifest(step=1), f"gave the manifest of run {RUN}, step 1, for step 0"),
        (manifest(protocol_version=2), "the coordinator's manifest of step 0 is of protocol 2"),
        (manifest(run_id="other"), "gave the manifest of run other, step 0, for step 0"),
        (manifest(previous_manifest=OTHER), "does not follow the one that this site has of the step before"),
        (
            exchange_pb2.ExchangeEvent(manifest=envelope.sign(COORDINATOR, envelope.MANIFEST_TYPE, b"\xff")),
            "the coordinator's manifest of step 0 is not valid: these bytes are not a Manifest",
        ),
        (
            exchange_pb2.ExchangeEvent(manifest=envelope.sign(COORDINATOR, envelope.CHUNK_HEADER_TYPE, b"")),
            "the coordinator's manifest of step 0 is not valid: the envelope holds",
        ),
    ],
    ids=["key", "step", "version", "run", "chain", "bytes", "purpose"],
)
def test_a_log_that_does_not_hold_together_ends_the_run_by_name(
    event: exchange_pb2.ExchangeEvent, sentence: str
) -> None:
    site = Site()
    with pytest.raises(HacrlFedError, match=sentence):
        site.read(event)
    assert not site.inbox.has_closed(0)


def test_a_manifest_that_lists_a_chunk_under_another_agent_ends_the_run_by_name() -> None:
    site = Site()
    chunk = Author("beta").chunk(0, GENESIS, [rollout(FIRST)])
    swapped = (ManifestEntry("alpha", Participation.COMPLETE, 1, 1, (digest_of(chunk),)),)
    with pytest.raises(HacrlFedError, match="the coordinator's manifest of step 0 lists a chunk of beta under alpha"):
        site.read(chunk_event(chunk), manifest(entries=swapped))


def test_a_manifest_that_comes_twice_is_one_that_does_not_follow() -> None:
    site = Site()
    with pytest.raises(HacrlFedError, match="step 0, for step 1"):
        site.read(manifest(), manifest())


def test_a_wait_ends_at_its_deadline_or_when_something_has_gone_wrong() -> None:
    site = Site()
    with pytest.raises(HacrlFedError, match="the manifest of step 0 did not come within 0 s"):
        site.inbox.wait_closed(0, 0.0, nothing)

    def fail() -> None:
        raise HacrlFedError("the session has ended")

    with pytest.raises(HacrlFedError, match="the session has ended"):
        site.inbox.wait_closed(0, 60.0, fail)


def equivocating(site: Site, closed_at_ms: int) -> tuple[Callable[[], None], str]:
    event = manifest(closed_at_ms=closed_at_ms)
    return lambda: site.read(event), digests.payload_digest(event.manifest)


def test_two_sites_that_were_told_different_things_refuse_each_others_next_chunk() -> None:
    alphas = Site()
    read, told_alpha = equivocating(alphas, closed_at_ms=1)
    told_beta = equivocating(Site(), closed_at_ms=2)[1]
    read()
    assert told_alpha != told_beta
    alphas.read(chunk_event(Author("beta").chunk(1, told_beta, [rollout(FIRST)])))
    assert alphas.admission.refused == {("beta", "manifest"): 1}
