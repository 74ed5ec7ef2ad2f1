"""axolotl's plugin that makes `experts_implementation: moe_ops` known to it:

    plugins:
      - moe_ops.integrations.axolotl.MoEOpsPlugin
    experts_implementation: moe_ops

axolotl imports plugins before it validates a configuration. A name that transformers does not know
by then becomes "eager", with a warning only.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

import moe_ops.integrations.transformers  # noqa: F401 - transformers knows the name from here on


class MoEOpsPlugin(BasePlugin):
    """Refuses a configuration that names the plugin and other experts, in place of running those
    in silence.
    """

    def register(self, cfg: Any) -> None:
        """Called with the configuration as it was written.

        Raises:
            ValueError: experts_implementation is not "moe_ops".
        """
        given = cfg.get("experts_implementation")
        if given != "moe_ops":
            raise ValueError(
                f"experts_implementation must be 'moe_ops' beside this plugin, got {given!r}; "
                "write experts_implementation: moe_ops, or leave the plugin out"
            )
