"""The expander of the cluster-autoscaler, as a servicer of the gRPC port."""

import msgspec
from google.protobuf.message import DecodeError

from fleetcast.clients.grpc_stubs.expander_pb2 import BestOptionsRequest, BestOptionsResponse, Node, Option
from fleetcast.schedulers.expander import ExpanderAnswer, ExpanderQuestion, GroupOption
from fleetcast.service.api.grpc_service import Ask, GrpcService, encode_message


def choose_best_options(ask: Ask, body: bytes) -> bytes:
    """Return the best options as a message without their pods.

    The autoscaler recognises options by the ids of their node groups.
    """
    asked = BestOptionsRequest()
    asked.ParseFromString(body)
    nodes = asked.nodeBytesMap
    options = [
        GroupOption(row.nodeGroupId, row.nodeCount, _parse_node_labels(nodes.get(row.nodeGroupId)))
        for row in asked.options
    ]
    answer = ask("best_options", msgspec.json.encode(ExpanderQuestion(options)))
    ids = set(msgspec.json.decode(answer, type=ExpanderAnswer).ids)
    best = [
        Option(nodeGroupId=row.nodeGroupId, nodeCount=row.nodeCount, debug=row.debug)
        for row in asked.options
        if row.nodeGroupId in ids
    ]
    return encode_message(BestOptionsResponse(options=best))


def _parse_node_labels(node: bytes | None) -> dict[str, str]:
    """Return the labels of a template node, or no labels if the node is unreadable."""
    read = Node()
    try:
        read.ParseFromString(node or b"")
    except DecodeError:
        return {}
    return dict(read.metadata.labels)


EXPANDER = GrpcService("expander", "grpcplugin.Expander", {"BestOptions": choose_best_options})
