"""The operator port: what ``llmgw ctl`` calls. It asks a Management for everything, and reaches nothing else."""
