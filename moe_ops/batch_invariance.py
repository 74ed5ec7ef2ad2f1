"""The process-wide switch of batch invariance, for calls whose argument `batch_invariant` is None.

With it a token's row of the output has the same bits whatever other tokens are in its batch;
docs/reproducibility.md states the limits. Each backend says for which calls it guarantees this
(`Takes.depends_on_batch`), and planning/plan.py leaves out the others.
"""

from __future__ import annotations

# A global of a module: torch.compile guards graphs with what traced code reads here.
_enabled = False


class set_batch_invariant:
    """Switch batch invariance on or off in the whole process, for all calls that do not pass
    `batch_invariant` themselves; as a context manager until the end of its block.

    Functions that were compiled under the other setting are compiled again. Threads share the
    switch, so their blocks must not overlap. Call it outside of compiled functions.

    Args:
        enabled: whether a token's row has the same bits in every batch; initially False.

    Raises:
        ValueError: enabled is not a bool.
    """

    def __init__(self, enabled: bool):
        global _enabled
        if not isinstance(enabled, bool):
            raise ValueError(f"enabled must be True or False, got {enabled!r}")
        self.enabled = enabled
        # the values to restore at the end of each block, the first one from before this object
        self._before, self._new = [_enabled], True
        _enabled = enabled

    def __enter__(self) -> None:
        global _enabled
        if not self._new or _enabled != self.enabled:
            self._before.append(_enabled)
            _enabled = self.enabled
        self._new = False

    def __exit__(self, *_: object) -> None:
        global _enabled
        _enabled = self._before.pop()


def resolve(batch_invariant: bool | None) -> bool:
    """The value of a call's argument `batch_invariant`; of None that of the switch.

    Raises:
        ValueError: it is neither None nor a bool.
    """
    if batch_invariant is None:
        return _enabled
    if not isinstance(batch_invariant, bool):
        raise ValueError(
            "batch_invariant must be True, False, or None for what moe_ops.set_batch_invariant "
            f"says, got {batch_invariant!r}"
        )
    return batch_invariant
