"""The planner: memory of a run on each rank, from its settings and the config.json of its models.
No torch here."""
