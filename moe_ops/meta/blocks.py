"""The order in which `batch_invariant` adds up a token's experts, on one device and on several.

Experts are split into EXPERT_BLOCKS runs of neighbours. Terms of one block are added in the order
of the token's entries, from +0 on, and then blocks by a binary tree: ((0 + 1) + (2 + 3)) +
((4 + 5) + (6 + 7)). So the ranks of an expert-parallel group of 1, 2, 4 or 8, each of which holds
whole blocks, return sums of the tree, and the rest of it adds the ranks. A block without terms is
+0. No sum is -0, so that this changes no bit. A number of experts that EXPERT_BLOCKS does not
divide is one block.
"""

EXPERT_BLOCKS = 8


def num_blocks(num_experts: int) -> int:
    """Blocks of so many experts, those of all ranks: EXPERT_BLOCKS or 1."""
    return 1 if num_experts % EXPERT_BLOCKS else EXPERT_BLOCKS
