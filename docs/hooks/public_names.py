"""Extension of griffe: public names of `moe_ops` that are imported on first use, and parameters
that a docstring describes together.

griffe reads sources and does not run them, so it does not see what `moe_ops.__getattr__` finds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import griffe

import moe_ops


class PublicNames(griffe.Extension):
    """Give the package a member for each name of `__all__`, wherever its object is defined, and
    split descriptions such as `w13, w2, backend: as in fused_experts`.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        if pkg.name != "moe_ops":
            return
        for described in _described(pkg):
            _split(described)
        for name in moe_ops.__all__:
            found = getattr(moe_ops, name)
            target = f"{found.__module__}.{found.__qualname__}"
            if name not in pkg.members:
                pkg.set_member(name, griffe.Alias(name, target))


def _described(parent: griffe.Object) -> Iterator[griffe.Class | griffe.Function]:
    """Classes and functions with docstrings, of a package and all that is in it."""
    for member in parent.members.values():
        if isinstance(member, griffe.Class | griffe.Function) and member.docstring:
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _described(member)


def _split(described: griffe.Class | griffe.Function) -> None:
    """Give each parameter of a description of several its type and default. Neighbours of the same
    type and default stay together. What is described together has no entry in the signature, and
    the site would call it required.
    """
    signature = described.parameters
    for section in described.docstring.parsed:
        if section.kind is not griffe.DocstringSectionKind.parameters:
            continue
        rows = []
        for row in section.value:
            names = row.name.split(", ")
            if len(names) == 1 or any(name not in signature for name in names):
                rows.append(row)
                continue
            of = [signature[name] for name in names]
            for _, group in itertools.groupby(of, lambda p: (str(p.annotation), str(p.default))):
                same = list(group)
                rows.append(
                    griffe.DocstringParameter(
                        ", ".join([parameter.name for parameter in same]),
                        annotation=same[0].annotation,
                        description=row.description,
                        value=same[0].default,
                    )
                )
        section.value = rows
