"""Which backend runs a call: facts of the machine, plans, tiers, and plans bound to a call."""
