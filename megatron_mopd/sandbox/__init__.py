"""Where programs run that nobody has read: `process.ProcessSandbox`, one subprocess each (protocols.Sandbox)."""
