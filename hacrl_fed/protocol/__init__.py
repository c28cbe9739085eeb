"""The wire: keys, roster, signed envelopes, conversion between records and protobuf, channels."""
