"""Names of routing methods."""

from moe_ops.routing.methods import RoutingMethod, resolve_routing_method


def test_routing_method_names_resolve():
    for method in RoutingMethod:
        assert resolve_routing_method(str(method)) is method
        assert resolve_routing_method(method) is method
