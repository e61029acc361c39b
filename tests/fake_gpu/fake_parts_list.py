NOT_EXECUTED: dict[str, str] = {}
