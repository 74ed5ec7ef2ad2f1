"""The README.md that `save_pretrained` leaves beside a model with quantized experts: a folder that
transformers alone refuses says itself how to load it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_utils import PreTrainedModel

from moe_ops.environment import DISTRIBUTION, FOREIGN_DISTRIBUTION
from moe_ops.tensors import ExpertTensor, sharding

_CARD = """---
library_name: transformers
tags:
- moe_ops
---
# {model} with experts in {schemes}

The weights of this model's experts are quantized to {schemes}; its other layers are not. With
`import moe_ops` transformers reads and runs them; without it, it says that
`experts_implementation="moe_ops"` is not supported.

```python
import moe_ops
import transformers

model = transformers.{cls}.from_pretrained("path/to/this/folder")
```

`moe_ops` is the distribution `{distribution}`; `{foreign}` on PyPI is another project.
"""


def card(model: PreTrainedModel) -> str:
    """Text on a model's quantized experts; empty if it has none."""
    weights = map(sharding.local_part, model.parameters())
    schemes = dict.fromkeys(w.scheme for w in weights if isinstance(w, ExpertTensor) and w.scheme)
    if not schemes:
        return ""
    name = type(model).__name__.removeprefix("FSDP")
    return _CARD.format(
        model=name,
        cls=name if hasattr(transformers, name) else "AutoModelForCausalLM",
        schemes=" and ".join([f"`{scheme}`" for scheme in schemes]),
        distribution=DISTRIBUTION,
        foreign=FOREIGN_DISTRIBUTION,
    )


def _with_card(own: Callable) -> Callable:
    """transformers' save_pretrained, with a README.md beside the files, unless there is one."""

    @functools.wraps(own)
    def save_pretrained(
        self: PreTrainedModel, save_directory: Any, *more: Any, **named: Any
    ) -> Any:
        result = own(self, save_directory, *more, **named)
        is_main_process = more[0] if more else named.get("is_main_process", True)
        folder, text = Path(save_directory), card(self)
        if text and is_main_process and (folder / "config.json").is_file():
            readme = folder / "README.md"
            with suppress(FileExistsError), open(readme, "x", encoding="utf-8") as file:
                file.write(text)
        return result

    return save_pretrained


PreTrainedModel.save_pretrained = _with_card(PreTrainedModel.save_pretrained)
