"""Extension of griffe: public names of `moe_ops` that are imported on first use.

griffe reads sources and does not run them, so it does not see what `moe_ops.__getattr__` finds.
"""

from __future__ import annotations

from typing import Any

import griffe

import moe_ops


class PublicNames(griffe.Extension):
    """Give the package a member for each name of `__all__`, wherever its object is defined."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.name != "moe_ops":
            return
        for name in moe_ops.__all__:
            found = getattr(moe_ops, name)
            target = f"{found.__module__}.{found.__qualname__}"
            if name not in pkg.members:
                pkg.set_member(name, griffe.Alias(name, target))
