"""The parts of the demo: a workspace with real tools, an agent that follows a script, a table, a plot, a summary."""
