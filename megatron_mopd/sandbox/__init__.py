"""Where programs run that nobody has read: `process.ProcessSandbox`, one subprocess each (protocols.Sandbox), and
workspaces of agents, whose state can be resumed (protocols.Workspace; load.py)."""
