"""Memory: what a step will take (planner), and the levers that make it take less."""
