import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

from hacrl_fed.protocol import flower
from hacrl_fed.v1 import session_pb2

INTEGERS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
CONFIGS = st.dictionaries(TEXTS, INTEGERS | NUMBERS | st.booleans() | TEXTS, max_size=5)
METRICS = st.dictionaries(TEXTS, INTEGERS | NUMBERS, max_size=5)
ENDS = {"run_id": 5, "src_node_id": 1, "dst_node_id": 9}


def message(config=None, metrics=None, **changes):
    settings = {
        "message_type": "train.block",
        "dst_node_id": 9,
        "group_id": "3",
        "ttl": 60.0,
        "run_id": 5,
        "message_id": "m1",
    } | changes
    return flower.make_message(config=config or {}, metrics=metrics or {}, **settings)


def with_content(content):
    made = message()
    made.content = content
    return made


def received(proto):
    return session_pb2.FlowerMessage.FromString(proto.SerializeToString())


def typed(record):
    return {key: (type(value), value) for key, value in record.items()}


@given(CONFIGS, METRICS)
def test_scalars_arrive_as_they_were_sent(config, metrics):
    sent = message(config, metrics)
    arrived = flower.from_proto(received(flower.to_proto(sent)), **ENDS)
    assert typed(arrived.content["config"]) == typed(config)
    assert typed(arrived.content["metrics"]) == typed(metrics)
    assert arrived.metadata == sent.metadata


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"config": ConfigRecord({"w": [0.1, 0.2]})}, "'w' must be a number, a truth value or text, not list"),
        ({"config": ConfigRecord({"w": ["a"]})}, "'w' must be a number, a truth value or text, not list"),
        ({"config": ConfigRecord({"w": b"\0"})}, "'w' must be a number, a truth value or text, not bytes"),
        ({"metrics": MetricRecord({"w": [0.1, 0.2]})}, "'w' must be a number, a truth value or text, not list"),
        ({"config": ConfigRecord({"w": 2**63})}, "'w' cannot be sent"),
        ({"config": ConfigRecord({"w": "\ud800"})}, "'w' cannot be sent"),
        ({"config": ArrayRecord([np.zeros(2)])}, "no ArrayRecord 'config'"),
        ({"model": ArrayRecord([np.zeros(2)])}, "no ArrayRecord 'model'"),
        ({"model": ConfigRecord({"w": 1})}, "no ConfigRecord 'model'"),
        ({"config": MetricRecord({"w": 1})}, "no MetricRecord 'config'"),
        ({"config": ConfigRecord({"w": "A" * 70_000})}, "may weigh 65536 bytes here, not 7"),
    ],
)
def test_what_could_carry_a_weight_is_not_sent(content, sentence):
    with pytest.raises(ValueError, match=sentence):
        flower.to_proto(with_content(RecordDict(content)))


def test_what_could_carry_a_weight_is_not_taken():
    good = flower.to_proto(message({"a": 1}, {"b": 2.0}))

    heavy = received(good)
    for index in range(8000):
        heavy.metrics[f"w{index}"].number = 0.1
    with pytest.raises(ValueError, match="may weigh 65536 bytes"):
        flower.from_proto(heavy, **ENDS)

    hidden = received(good)
    hidden.config["a"].MergeFromString(b"\x9a\x06\x01A")  # field 99, a text
    with pytest.raises(ValueError, match="FlowerMessage holds fields that its schema lacks"):
        flower.from_proto(hidden, **ENDS)


def test_a_message_that_flower_would_not_write_is_refused():
    good = flower.to_proto(message({"a": 1}, {"b": 2.0}))
    for name, sentence in (("text", "metric 'b' must be a number, not str"), ("boolean", "not bool")):
        bad = received(good)
        setattr(bad.metrics["b"], name, 1 if name == "boolean" else "x")
        with pytest.raises(ValueError, match=sentence):
            flower.from_proto(bad, **ENDS)
    bad = received(good)
    bad.config["a"].Clear()
    with pytest.raises(ValueError, match="'a' has no value"):
        flower.from_proto(bad, **ENDS)
    bad = received(good)
    bad.message_type = "delete.everything"
    with pytest.raises(ValueError, match="Invalid message type"):
        flower.from_proto(bad, **ENDS)
    bad = received(good)
    bad.error_code = 1
    with pytest.raises(ValueError, match="an error or content, not both"):
        flower.from_proto(bad, **ENDS)


@pytest.mark.parametrize("reason", ["the model did not load", None])
def test_an_error_is_carried_as_its_code_and_reason(reason):
    sent = Message(Error(7, reason), reply_to=message())
    arrived = flower.from_proto(received(flower.to_proto(sent)), **ENDS)
    assert arrived.has_error() and not arrived.has_content()
    assert arrived.error == Error(7, reason)
    assert arrived.metadata.reply_to_message_id == "m1"


@pytest.mark.parametrize("code", [0, -1, 2**32])
def test_an_error_code_that_does_not_fit_is_refused(code):
    with pytest.raises(ValueError, match="a Flower error's code must be from 1"):
        flower.to_proto(Message(Error(code), reply_to=message()))


def test_ids_are_stable_distinct_and_fit_flower():
    # printf 'node alpha' | sha256sum, the first 8 bytes, shifted right by one
    assert flower.node_id("alpha") == 0x36984A01F124CBB8
    ids = {flower.node_id("alpha"), flower.node_id("beta"), flower.run_id("alpha"), flower.run_id("demo")}
    assert len(ids) == 4
    assert all(flower.SERVER_NODE_ID < number < 2**63 for number in ids)


def test_a_client_app_runs_on_a_message_that_came_over_the_wire_and_its_reply_goes_back():
    """The contract with Flower that the rest builds on."""
    app = ClientApp()

    @app.train("block")
    def block(order: Message, context: Context) -> Message:
        step = order.content["config"]["first_step"]
        metrics = MetricRecord({"reward": 0.5, "steps": 10})
        return Message(
            RecordDict({"config": ConfigRecord({"next_step": step + 10}), "metrics": metrics}), reply_to=order
        )

    node, run = flower.node_id("alpha"), flower.run_id("demo")
    order = message({"first_step": 20}, dst_node_id=node, run_id=run, message_id="order-2")
    on_site = flower.from_proto(
        received(flower.to_proto(order)), run_id=run, src_node_id=flower.SERVER_NODE_ID, dst_node_id=node
    )
    context = Context(run_id=run, node_id=node, node_config={}, state=RecordDict(), run_config={})
    reply = app(on_site, context)
    assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (node, flower.SERVER_NODE_ID)

    at_server = flower.from_proto(
        received(flower.to_proto(reply)), run_id=run, src_node_id=node, dst_node_id=flower.SERVER_NODE_ID
    )
    assert at_server.metadata.reply_to_message_id == "order-2"
    assert at_server.metadata.message_type == "train.block"
    assert at_server.metadata.group_id == "3"
    assert dict(at_server.content["config"]) == {"next_step": 30}
    assert dict(at_server.content["metrics"]) == {"reward": 0.5, "steps": 10}
