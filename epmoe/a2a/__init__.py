"""Plan, dispatch and combine: the layers, their operators, and the layers over several nodes."""
