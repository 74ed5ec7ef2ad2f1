"""Routing methods: names, and which one a configuration means."""

import pytest

from moe_ops.routing.methods import RoutingMethod, get_routing_method, resolve_routing_method


def test_routing_method_names_resolve():
    for method in RoutingMethod:
        assert resolve_routing_method(str(method)) is method
        assert resolve_routing_method(method) is method


@pytest.mark.parametrize(
    ("scoring", "top_k", "renormalize", "groups", "bias", "expected"),
    [
        ("sigmoid", 8, True, 8, True, RoutingMethod.DEEPSEEK_V3),
        ("sigmoid", 1, False, 1, True, RoutingMethod.DEEPSEEK_V3),
        ("sigmoid", 8, True, 0, True, RoutingMethod.UNSPECIFIED),
        ("sigmoid", 8, True, None, True, RoutingMethod.UNSPECIFIED),
        ("softmax", 8, True, 8, True, RoutingMethod.UNSPECIFIED),
        ("sqrtsoftplus", 8, True, 8, True, RoutingMethod.UNSPECIFIED),
        ("sigmoid", 1, False, None, False, RoutingMethod.LLAMA4),
        ("sigmoid", 2, True, None, False, RoutingMethod.UNSPECIFIED),
        ("softmax", 2, True, None, False, RoutingMethod.RENORMALIZE),
        ("softmax", 2, False, None, False, RoutingMethod.DEFAULT),
        ("sqrtsoftplus", 2, True, None, False, RoutingMethod.UNSPECIFIED),
    ],
)
def test_get_routing_method(scoring, top_k, renormalize, groups, bias, expected):
    assert get_routing_method(scoring, top_k, renormalize, groups, bias) is expected


def test_get_routing_method_rejects_an_unknown_scoring():
    with pytest.raises(ValueError, match="scoring must be one of softmax, .*got 'tanh'"):
        get_routing_method("tanh", 2, True, None, False)
