"""A site as a Flower ClientApp: what the coordinator may order, and how it is answered."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import flower
from hacrl_fed_client.site import Site

MESSAGE_TYPES = frozenset({"train.block", "evaluate"})


def build_client_app(site: Site) -> ClientApp:
    """The ClientApp of a site. It lives as long as its process, and so does the site's model."""
    app = ClientApp()

    @app.train("block")
    def train_block(message: Message, context: Context) -> Message:
        until_step = message.content.config_records[flower.CONFIG].get("until_step")
        if not isinstance(until_step, int):
            raise HacrlFedError(
                f"the coordinator's order is not valid: until_step must be an integer, not {until_step!r}"
            )
        return _reply(message, site.train_until(until_step))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        when = message.content.config_records[flower.CONFIG].get("when")
        if when not in ("before", "after"):
            raise HacrlFedError(f"the coordinator's order is not valid: when must be 'before' or 'after', not {when!r}")
        return _reply(message, site.evaluate(str(when)))

    return app


def _reply(message: Message, metrics: dict[str, float]) -> Message:
    return Message(RecordDict({flower.METRICS: MetricRecord(dict(metrics))}), reply_to=message)
