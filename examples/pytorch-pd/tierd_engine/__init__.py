"""A client of tierd's engine API in Python. README.md beside it is the guide.

The API itself is host/engine/enginepb/engine.proto; engine_pb2.py is generated from it
(make proto). This package needs grpcio and protobuf, and tierd_engine.memory also torch.
"""

from . import engine_pb2 as pb
from .client import Client, Gone, Late, Pull, Refused
from .keys import blocks_of, prefix_hashes

__all__ = ["Client", "Gone", "Late", "Pull", "Refused", "blocks_of", "pb", "prefix_hashes"]
